-- Creates a task of a schedule now, or, without a group, of each of the name in all groups. Its ticks stay as they are; a paused schedule can be run, too.
-- Returns the ids of the tasks. Raises QF018 when no schedule has the name, and what create_task raises.
-- Locks: the schedules.
create function fairq.run_schedule(p_name text, p_group_key text default null) returns setof bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_schedule fairq.schedules;
  v_id bigint;
begin
  for v_schedule in select n.* from fairq._schedules(p_name, p_group_key) n loop
    v_id := fairq.create_task(v_schedule.group_key, v_schedule.payload, v_schedule.queue, v_schedule.kind, p_priority => v_schedule.priority,
      p_concurrency_key => v_schedule.concurrency_key, p_headers => fairq._tick_headers(v_schedule.headers, v_schedule.name, v_now));
    update fairq.schedules s
    set last_task_id = v_id
    where s.shard_no = v_schedule.shard_no and s.name = v_schedule.name and s.group_key = v_schedule.group_key;
    return next v_id;
  end loop;
end;
$$;
comment on function fairq.run_schedule is 'Creates a task of a schedule now, beside its ticks. Returns its id.';
