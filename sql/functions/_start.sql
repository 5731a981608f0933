-- Claimed tasks that the caller has locked begin to run, unless their deadline or their lease has passed. By ctid and no other way, see _hold.
-- Returns the ids to run.
create function fairq._start(p_shard_no integer, p_ctids tid[], p_now timestamptz) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_expired tid[];
begin
  select array_agg(t.ctid) into v_expired
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.ctid = any(p_ctids)
    and t.expires_at <= p_now;
  if v_expired is not null then
    perform fairq._end_tasks(p_shard_no, v_expired, 'expired', null, p_now);
  end if;
  return query
    update fairq.tasks t
    set state = 'running', started_at = p_now, lease_expires_at = null
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
      and t.lease_expires_at > p_now
    returning t.id;
end;
$$;
comment on function fairq._start(integer, tid[], timestamptz) is 'Claimed tasks begin to run.';
