-- The lanes of a queue anew from its tasks. One statement counts the tasks, removes the rings that these cover, and gives the snapshot. Taken a
-- moment apart, a task that ended in between would be off the count already, and its ring, which the tick holds for pending, would take it off again.
-- Returns the snapshot.
-- Locks: lanes, rings of the domain; the caller holds the domain.
-- Cost: all live tasks of the domain.
create function fairq._rebuild_lanes(p_shard_no integer, p_queue fairq.queues, p_clock bigint, p_now timestamptz) returns pg_snapshot
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_snapshot pg_snapshot;
begin
  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue.queue
  ),
  level as (
    select t.group_key, t.priority,
      min(t.sequence) as first_sequence,
      min(t.sequence) filter (where t.state = 'overflow') as waiting_from,
      max(t.block + fairq._step(coalesce(t.charge, t.cost), coalesce(g.weight, p_queue.weight))) as finish,
      max(t.block) as last_block,
      count(*) filter (where t.counted) as in_flight,
      bool_or(t.concurrency_key is not null) as keyed,
      min(t.priority) filter (where t.state = 'queued') as last_priority
    from fairq.tasks t
    left join fairq.groups g on g.shard_no = t.shard_no and g.queue = t.queue and g.group_key = t.group_key
    where t.shard_no = p_shard_no
      and t.queue = p_queue.queue
    group by t.group_key, t.priority
  ),
  lane as (
    select l.group_key,
      row_number() over (order by min(l.first_sequence)) as lane_no,
      greatest(p_clock, max(l.finish)) as finish,
      max(l.last_block) as last_block,
      sum(l.in_flight)::integer as in_flight,
      bool_or(l.keyed) as keyed,
      coalesce(min(l.last_priority), 0) as last_priority,
      coalesce(array_agg((l.priority, l.waiting_from)::fairq.cursor order by l.priority desc)
        filter (where l.waiting_from is not null), '{}') as cursors
    from level l
    group by l.group_key
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, keyed, policy, gate, pace, last_priority, cursors,
      look_at, admissible)
    select p_shard_no, p_queue.queue, l.group_key, 1, l.lane_no, l.finish, fairq._lane_position(l.lane_no), coalesce(g.weight, p_queue.weight),
      l.keyed, x.policy, x.gate, case when p_queue.fairness = 'time' then (coalesce(l.last_block, -1), 0, '{}')::fairq.pace end, l.last_priority, l.cursors, null,
      l.cursors <> '{}' and (x.policy is null or (fairq._allowance(x.policy, x.gate, p_now)).tasks > 0)
    from lane l
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = p_queue.queue and g.group_key = l.group_key
    cross join lateral (
      select y.policy, case when y.policy is distinct from null then fairq._settle(y.policy, null, -l.in_flight, 0, false, p_now) end as gate
      from (select fairq._policy(p_queue, g) as policy offset 0) y
      offset 0
    ) x
  )
  select pg_current_snapshot() into v_snapshot;
  return v_snapshot;
end;
$$;
comment on function fairq._rebuild_lanes(integer, fairq.queues, bigint, timestamptz) is 'Makes the lanes of a queue anew from its tasks.';
