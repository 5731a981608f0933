-- Ends waiting tasks of a shard whose deadline passed, at most p_limit. Promotion and pop would refuse them too, when their turn comes; this
-- tells their owners in time.
-- Each deadline is looked at once: the sweep starts where the last one ended, not at the dead entries of tasks long finished. A task
-- whose transaction committed after its own deadline is missed here and meets promotion.
-- Held tasks are left to their holders.
-- Locks: the domains of the tasks it ends, without waiting (a busy one is left for the next sweep); ready and parked rows with "skip locked".
-- enable_sort is off: the rows come in the order of the index, another one with a sort behind it would read all of them.
-- Cost: tasks_expiry_idx from the floor to now.
create function fairq._expire_waiting(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = '' set enable_sort = off as $$
declare
  v_floor timestamptz := to_timestamp(fairq._sweep_floor(p_shard_no, 'expiry') / 1000000.0);
  v_until timestamptz;
  v_queue text;
  v_ended integer := 0;
  v_complete boolean := true;
begin
  select coalesce(max(e.expires_at) filter (where e.nth > p_limit), p_now) into v_until
  from (
    select t.expires_at, row_number() over (order by t.expires_at) as nth
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.expires_at >= coalesce(v_floor, '-infinity')
      and t.expires_at <= p_now
    order by t.expires_at
    limit p_limit + 1
  ) e;

  for v_queue in
    select distinct t.queue
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.expires_at >= coalesce(v_floor, '-infinity')
      and t.expires_at <= v_until
    order by t.queue
  loop
    if fairq._lock_domain(p_shard_no, v_queue, false) then
      v_ended := v_ended + cardinality(fairq._end_waiting(p_shard_no, array(
        select t.id
        from fairq.tasks t
        where t.shard_no = p_shard_no and t.queue = v_queue
          and t.expires_at >= coalesce(v_floor, '-infinity')
          and t.expires_at <= v_until
        order by t.expires_at
        limit p_limit - v_ended
      ), 'expired', p_now));
    else
      v_complete := false;
    end if;
  end loop;

  -- Many deadlines may be equal: when the limit was reached there may be more at v_until.
  if v_complete and v_ended < p_limit then
    perform fairq._set_sweep_floor(p_shard_no, 'expiry', (extract(epoch from v_until) * 1000000)::bigint);
  end if;
  return v_ended;
end;
$$;
