-- The schedule with its next tick after done_until, and the time at which that fires.
create function fairq._aimed(p_schedule fairq.schedules) returns fairq.schedules
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_seconds numeric := extract(epoch from p_schedule.every);
begin
  p_schedule.next_tick := case
    when v_seconds is null then (select min(t.tick) from unnest(p_schedule.ticks) t(tick) where t.tick > p_schedule.done_until)
    else to_timestamp(((floor(extract(epoch from p_schedule.done_until) / v_seconds) + 1) * v_seconds)::double precision)
  end;
  p_schedule.fire_at := case when p_schedule.paused_at is null then p_schedule.next_tick + p_schedule.delay end;
  return p_schedule;
end;
$$;

-- Creates the tasks of due schedules, one tick of each, at most p_limit. Another call, later or at the same time, creates the rest. One transaction locks a
-- schedule, creates its task and moves it on, by the database's clock; whoever reads it after that finds it not due. So a tick happens once, however many call.
-- The caller's own rights do not count: the queue's enqueue_role was checked for whoever made the schedule. A queue that drains, or is gone, refuses the task.
-- Returns the ids of the tasks.
-- It updates schedules one by one: a join of due schedules with their table, planned while that was empty, reads all of it.
-- Locks: schedules, "skip locked"; tasks and rings are only inserted.
-- Cost: schedules_fire_at_idx up to now; one update and two inserts a tick.
create function fairq._fire_due(p_shard_no integer, p_limit integer, p_now timestamptz) returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp set enable_sort = off as $$
declare
  v_due record;
  v_task_id bigint;
  v_fired bigint[] := array[]::bigint[];
  v_queues text[] := array[]::text[];
begin
  for v_due in
    select d.*, f.tick,
      case when d.every is null then (select min(t.tick) from unnest(d.ticks) t(tick) where t.tick > f.tick) else f.tick + d.every end as following,
      d.missed <> 'skip' or p_now <= f.tick + d.delay + interval '1 minute' as fires
    from (
      select s.* from fairq.schedules s
      where s.shard_no = p_shard_no and s.fire_at <= p_now
      order by s.fire_at limit p_limit for update skip locked
    ) d
    -- The last tick whose time has come.
    cross join lateral (
      select case
        when d.every is null then (select max(t.tick) from unnest(d.ticks) t(tick) where t.tick <= p_now - d.delay)
        else d.next_tick + floor(extract(epoch from p_now - d.fire_at) / extract(epoch from d.every))::double precision * d.every
      end as tick
    ) l
    -- The tick that fires.
    cross join lateral (
      select case when d.missed <> 'all' then l.tick when d.every is null then d.next_tick else greatest(d.next_tick, l.tick - 99 * d.every) end as tick
    ) f
  loop
    v_task_id := null;
    if v_due.fires then
      insert into fairq.tasks as t (shard_no, id, sequence, queue, group_key, kind, priority, created_at, cost, max_attempts, timeout,
        concurrency_key, headers, payload)
      select p_shard_no, i.id, i.id, v_due.queue, v_due.group_key, v_due.kind, o.priority, p_now, o.cost, o.max_attempts, o.timeout,
        v_due.concurrency_key, fairq._tick_headers(v_due.headers, v_due.name, v_due.tick), v_due.payload
      from fairq._options(v_due.queue, v_due.kind, null, v_due.priority, null, null) o
      cross join nextval('fairq.task_ids') i(id)
      where o.draining_at is null
      returning t.id, t.priority into v_task_id, v_due.priority;
    end if;
    if v_task_id is not null then
      insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
      values (p_shard_no, v_due.queue, v_due.group_key, v_due.priority, v_task_id, v_due.concurrency_key is not null);
      v_fired := v_fired || v_task_id;
      if v_due.queue <> all(v_queues) then v_queues := v_queues || v_due.queue; end if;
    end if;
    update fairq.schedules s
    set done_until = v_due.tick, next_tick = v_due.following, fire_at = v_due.following + s.delay,
      plan_at = case when v_due.following is null then p_now else s.plan_at end,
      last_tick = case when v_task_id is null then s.last_tick else v_due.tick end, last_task_id = coalesce(v_task_id, s.last_task_id),
      problem = case when v_due.fires and v_task_id is null then format('queue "%s" is draining, or gone', v_due.queue) end
    where s.shard_no = p_shard_no and s.name = v_due.name and s.group_key = v_due.group_key;
  end loop;
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = any(v_queues) and q.notify;
  return v_fired;
end;
$$;

-- The headers of a schedule's task: the schedule's own, its name and the tick.
create function fairq._tick_headers(p_headers jsonb, p_name text, p_tick timestamptz) returns jsonb
language sql stable as $$
  select coalesce(p_headers, '{}')
    || jsonb_build_object('schedule', p_name, 'scheduled_for', to_char(p_tick at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'))
$$;

-- Locks and returns the schedules of a name, of one group or of all.
-- Raises QF018 when there is none. Do not join it with anything: a join whose other side is empty does not call it at all.
create function fairq._schedules(p_name text, p_group_key text) returns setof fairq.schedules
language plpgsql rows 10 set search_path = pg_catalog, pg_temp as $$
begin
  return query
    select s.* from fairq.schedules s
    where s.shard_no = any(array(select fairq._shards(null))) and s.name = p_name and (p_group_key is null or s.group_key = p_group_key)
    order by s.shard_no, s.group_key for update;
  if not found then
    raise exception 'there is no schedule %', coalesce('"' || left(p_name, 200) || '"', 'null') || coalesce(' of group "' || left(p_group_key, 200) || '"', '')
      using errcode = 'QF018', hint = 'See: select name, group_key from fairq.schedule_stats;';
  end if;
end;
$$;
