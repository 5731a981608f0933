-- Makes lanes, rings and ticks anew from fairq.tasks, which is the truth (I11). Runs by itself when a domain has no tick it can trust: in a
-- new installation, and after a dump was restored.
-- One statement counts the tasks and their places, removes the rings that these cover, and gives the snapshot that the new tick stores. Taken a
-- moment apart, a task that ended in between would be off the count already, and its ring, which the tick holds for pending, would take it off again.
-- Rings of transactions still running are pending and will be heard.
-- Wishes to cancel waiting tasks are rung again.
-- Returns the tick it wrote.
-- Locks: lanes, ticks, rings, sweeps of the domain; the caller holds the domain.
-- Cost: all live tasks of the domain.
create function fairq._rebuild(p_shard_no integer, p_queue fairq.queues, p_now timestamptz) returns fairq.ticks
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_snapshot pg_snapshot;
  v_tick fairq.ticks;
begin
  delete from fairq.lanes l where l.shard_no = p_shard_no and l.queue = p_queue.queue;

  select coalesce(max(k.tick), 0) + 1 into v_tick.tick
  from fairq.ticks k
  where k.shard_no = p_shard_no
    and k.queue = p_queue.queue;
  v_tick.shard_no := p_shard_no;
  v_tick.queue := p_queue.queue;
  v_tick.created_at := p_now;
  v_tick.clock_position := 0::bigint;
  v_tick.newcomer_position := 0::bigint;
  v_tick.heard_xid := pg_current_xact_id();
  v_tick.heard_ring := 0::bigint;
  delete from fairq.ticks k where k.shard_no = p_shard_no and k.queue = p_queue.queue;
  -- Transaction ids, ticks and the clock may start lower than the sweeps have come.
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what in ('rings ' || p_queue.queue, 'ticks ' || p_queue.queue, 'lanes ' || p_queue.queue);

  select coalesce(min(t.block) filter (where t.state = 'queued'), max(t.block), 0), coalesce(max(t.block), 0)
  into v_tick.clock, v_tick.top
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.queue = p_queue.queue;

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
      greatest(v_tick.clock, max(l.finish)) as finish,
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
  ),
  -- Keys and meters have no tasks of their own: their places are those of the tasks in flight. Those with settings have a lane in any case.
  configured as (
    insert into fairq.rings (shard_no, queue, group_key)
    select g.shard_no, g.queue, g.group_key
    from fairq.groups g
    where p_queue.internal
      and g.shard_no = p_shard_no
      and g.queue = p_queue.queue
  ),
  taken as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select s.shard_no, s.queue, s.group_key, -count(*)
    from fairq._shards(case when p_queue.queue = '#keys' then p_shard_no end) x(shard_no)
    cross join lateral (
      select t.shard_no, t.queue, t.group_key, t.counted, t.meters, t.concurrency_key
      from fairq.tasks t
      where t.shard_no = x.shard_no
        and t.block is not null
        and (t.meters <> 0 or t.concurrency_key is not null)
      offset 0
    ) t
    cross join lateral fairq._scopes(t.shard_no, t.queue, t.group_key, t.counted, t.meters, t.concurrency_key) s
    where p_queue.internal
      and s.shard_no = p_shard_no
      and s.queue = p_queue.queue
    group by s.shard_no, s.queue, s.group_key
  )
  select pg_current_snapshot() into v_snapshot;
  v_tick.next_xid := pg_snapshot_xmax(v_snapshot);
  v_tick.pending := array(
    select p.xid
    from (select pg_snapshot_xip(v_snapshot) union select pg_current_xact_id()) p(xid)
    where p.xid < v_tick.next_xid
  );

  -- A schedule or a wish told twice does no harm; one that committed before the snapshot would be told by nothing else.
  select min(t.run_at) into v_tick.next_due_at
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.queue = p_queue.queue
    and t.state = 'scheduled';

  select count(*), coalesce(bool_or(l.keyed), false), greatest(v_tick.top, max(l.finish)) into v_tick.lane_count, v_tick.keyed, v_tick.top
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue.queue;

  select l.finish, l.position into v_tick.horizon, v_tick.horizon_position
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue.queue
    and l.admissible
  order by l.finish, l.position
  limit 1;
  if v_tick.horizon is not null then
    v_tick.refill_block := v_tick.clock;
    v_tick.refill_position := v_tick.clock_position;
  end if;

  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select t.shard_no, t.queue, t.group_key, t.id
  from fairq.cancellations c
  join fairq.tasks t on t.shard_no = c.shard_no and t.id = c.task_id
  where c.shard_no = p_shard_no
    and t.queue = p_queue.queue
    and t.worker_id is null;

  perform fairq._write_tick(v_tick);
  return v_tick;
end;
$$;
comment on function fairq._rebuild(integer, fairq.queues, timestamptz) is 'Makes the derived state of a domain anew from its tasks.';
