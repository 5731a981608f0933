-- Ends waiting tasks of a shard whose deadline has passed, at most p_limit. Promotion and pop would refuse them too, when their turn comes; this tells their
-- owners in time. Each deadline is looked at once: the sweep starts where the last one ended, not at the dead entries of tasks long finished. It misses a task
-- whose transaction committed after the task's deadline: promotion ends that one. Held tasks are left to their holders.
-- Locks: the domains of the tasks it ends and #keys, without waiting (a busy one is left for the next sweep); ready and parked rows with "skip locked".
-- Cost: tasks_expiry_idx from the floor to now.
create function fairq._expire_waiting(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = pg_catalog, pg_temp set enable_sort = off as $$
declare
  v_floor timestamptz := fairq._time_floor(p_shard_no, 'expiry', p_now);
  v_late record;
  v_found integer := 0;
  v_last timestamptz := p_now;
  v_ended integer := 0;
  v_complete boolean := true;
  v_rings boolean;
begin
  for v_late in
    select e.queue, array_agg(e.id) as ids, max(e.expires_at) as last, count(*)::integer as tasks
    from (
      select t.id, t.queue, t.expires_at from fairq.tasks t
      where t.shard_no = p_shard_no and t.expires_at >= v_floor and t.expires_at <= p_now
        and not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = t.id offset 0)
      order by t.expires_at limit p_limit
    ) e
    group by e.queue
    order by e.queue
  loop
    v_found := v_found + v_late.tasks;
    v_last := greatest(v_late.last, case when v_found > v_late.tasks then v_last end);
    -- Whoever ends tasks that wait for a key holds #keys.
    if fairq._lock_domain(p_shard_no, v_late.queue, false) and fairq._lock_domain(p_shard_no, '#keys', false) then
      -- Ready tasks go back in line first.
      select fairq._ring_late(k, p_now) into v_rings from fairq._tick(p_shard_no, v_late.queue) k;
      if v_rings then
        perform fairq._promote(p_shard_no, v_late.queue, 1, false);
      end if;
      perform fairq._end_waiting(p_shard_no, v_late.ids, 'expired', p_now);
      v_ended := v_ended + (
        select count(*)::integer from unnest(v_late.ids) i(id)
        where not exists (select from fairq._body(p_shard_no, i.id))
      );
    else
      v_complete := false;
    end if;
  end loop;

  -- Many deadlines may be equal: when there may be more tasks, the next sweep starts at the last deadline.
  if v_complete then
    perform fairq._set_sweep_floor(p_shard_no, 'expiry', (extract(epoch from case when v_found < p_limit then p_now else v_last end) * 1000000)::bigint);
  end if;
  return v_ended;
end;
$$;
