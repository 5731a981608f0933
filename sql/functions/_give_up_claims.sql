-- Claims whose lease ran out go back in line, at most p_limit; no attempt is burned, for none began. The sweep starts where the last one ended, not at
-- the dead entries of all claims ever made; it does not pass one that is locked, being started or finished right now.
-- Returns how many it gave up.
-- Locks: tasks, "skip locked".
-- Cost: tasks_claim_lease_idx from the floor to now.
create function fairq._give_up_claims(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
set enable_sort = off
as $$
declare
  v_floor timestamptz := coalesce(to_timestamp(fairq._sweep_floor(p_shard_no, 'claims') / 1000000.0), '-infinity');
  v_given_up integer;
begin
  v_given_up := fairq._return_tasks(p_shard_no, array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state = 'claimed'
      and t.lease_expires_at >= v_floor
      and t.lease_expires_at <= p_now
    order by t.lease_expires_at
    limit p_limit
    for update skip locked
  ), false);

  if not exists (
    select
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state = 'claimed'
      and t.lease_expires_at >= v_floor
      and t.lease_expires_at <= p_now
  ) then
    -- A claim that another transaction is making now may already be over when it commits; a minute is left for that.
    perform fairq._set_sweep_floor(p_shard_no, 'claims', (extract(epoch from p_now - interval '1 minute') * 1000000)::bigint);
  end if;
  return v_given_up;
end;
$$;
comment on function fairq._give_up_claims(integer, integer, timestamptz) is 'Puts claims whose lease ran out back in line.';
