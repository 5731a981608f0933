-- Makes lanes, rings and ticks anew from fairq.tasks, which is the truth (I11). Runs by itself when a domain has no tick it can trust: in a
-- new installation, and after a dump was restored.
-- What tasks and places there are, which rings that covers, and the snapshot that the new tick stores come from one statement: see _rebuild_lanes, _rebuild_places.
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
  v_tick.filled := 0;
  delete from fairq.ticks k where k.shard_no = p_shard_no and k.queue = p_queue.queue;
  -- Transaction ids, ticks and the clock may start lower than the sweeps have come.
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what in ('rings ' || p_queue.queue, 'ticks ' || p_queue.queue, 'lanes ' || p_queue.queue);

  select coalesce(min(t.block) filter (where t.state = 'queued'), max(t.block), 0), coalesce(max(t.block), 0)
  into v_tick.clock, v_tick.top
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.queue = p_queue.queue;

  v_snapshot := case
    when p_queue.internal then fairq._rebuild_places(p_shard_no, p_queue.queue)
    else fairq._rebuild_lanes(p_shard_no, p_queue, v_tick.clock, p_now)
  end;
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
