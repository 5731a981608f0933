-- Promotion of one domain, top to bottom: due tasks, keys, rings, recalls, cancellations, admission, tick.
-- Returns the number of tasks promoted, null when another session is at it and p_wait is false.
-- p_used_up is the tick whose ready set the caller found used up: what is still queued before the horizon is being popped by others, and a pop
-- in flight, or one whose client hangs, must not keep the rest waiting. Who promoted since has seen to it: callers that waited for the lock
-- would each add another ready set.
-- Raises QF003, QF005 (see _lock_domain).
-- Locks: domains, then tasks and lanes as the parts say; all until the end of the transaction.
-- Killed anywhere, the transaction rolls back and the next promotion starts from the last committed tick.
create function fairq._promote(p_shard_no integer, p_queue text, p_limit integer, p_wait boolean, p_used_up bigint default null)
returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_now timestamptz;
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_first record;
  v_heard record;
  v_recall record;
  v_cancelled text[];
  v_short boolean;
  v_refill boolean;
  v_done record;
  v_look_at timestamptz;
  v_due_at timestamptz;
begin
  if not fairq._lock_domain(p_shard_no, p_queue, p_wait) then
    return null;
  end if;
  v_now := fairq._now();
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if not found then
    v_tick := fairq._rebuild(p_shard_no, v_queue, v_now);
  end if;

  -- Concurrency keys belong to all queues of the shard: their lock is held while places are taken. What was freed is heard now, and the tasks that
  -- waited for it ring below. A pop waits for that lock for a moment only: it may hold the meters, for which another transaction waits that holds
  -- the keys, because it popped another queue before.
  if v_tick.keyed then
    if not p_wait and not fairq._lock_domain(p_shard_no, '#keys', false) and not fairq._await_domain(p_shard_no, '#keys') then
      return null;
    end if;
    perform fairq._promote(p_shard_no, '#keys', 1, true);
  end if;

  -- Due tasks first: they ring, and the rings of this transaction are heard below.
  v_due_at := v_tick.next_due_at;
  if v_due_at <= v_now then
    perform fairq._wake_due(v_tick, v_now, p_limit);
    select min(t.run_at) into v_tick.next_due_at
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue
      and t.state = 'scheduled'
      and t.run_at >= v_tick.next_due_at;
  end if;

  -- The first task still queued; one that is being popped counts, too. With the horizon it gives the clock.
  select t.block, t.position into v_first
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.queue = p_queue
    and t.state = 'queued'
    and (t.block, t.position) >= (v_tick.clock, v_tick.clock_position)
  order by t.block, t.position
  limit 1;
  v_tick := fairq._move_clock(v_tick, v_first.block, v_first.position);
  if v_tick.clock > 2305843009213693952 then
    v_first.block := v_first.block - v_tick.clock;
    v_tick := fairq._rebase(v_tick, v_tick.clock);
  end if;

  select h.* into v_heard from fairq._hear_rings(v_tick, v_queue, greatest(p_limit, 10000), v_now) h;
  if not v_tick.keyed and exists (select from unnest(v_heard.o_lanes) l where l.keyed) then
    v_tick.keyed := true;
    perform fairq._promote(p_shard_no, '#keys', 1, true);
  end if;
  if p_queue = '#keys' then
    perform fairq._unblock(p_shard_no, v_heard.o_lanes, v_now);
  end if;

  -- Lanes that may have tasks queued which should not be there: those whose waiting tasks now begin with a higher priority than the last one
  -- promoted, those that were paused, whose breaker opened or whose cap was lowered, and those of queued tasks to be cancelled, whose addresses the group gets back.
  v_cancelled := case when v_heard.o_cancelled is null then '{}' else fairq._groups_of_queued(p_shard_no, v_heard.o_cancelled) end;
  select array_agg(l.group_key) as groups, array_agg(case when not w.is_recalled then (l.cursors[1]).priority end) as priorities into v_recall
  from unnest(v_heard.o_lanes) l
  cross join lateral (
    select l.group_key = any(v_cancelled)
      or coalesce((l.policy).paused_at is not null or (l.gate).open_until > v_now or (l.gate).in_flight > (l.policy).max_running, false)
      as is_recalled
  ) w
  where l.finish > v_tick.clock
    and (w.is_recalled or (l.cursors[1]).priority > l.last_priority);
  if v_recall.groups is not null then
    v_heard.o_lanes := fairq._recall_queued(v_tick, v_heard.o_lanes, v_recall.groups, v_recall.priorities, v_now);
  end if;
  if v_heard.o_cancelled is not null then
    perform fairq._cancel_waiting(p_shard_no, v_heard.o_cancelled, v_now);
  end if;

  -- The ready set is short when pops have passed its middle, or stand at the horizon, which may lie before it: a lane of cheap tasks gets
  -- as many tasks as the others and comes less far. Then it gets p_limit more; when nothing waits for that many, what comes later goes on filling it.
  -- Otherwise only the lanes just rung are looked at, and only for what comes before the horizon, or before the end of a ready set that is full.
  v_short := coalesce(p_used_up = v_tick.tick, false) or v_first.block is null or v_tick.refill_block is null
    or (v_first.block, v_first.position) >= (v_tick.refill_block, v_tick.refill_position)
    or coalesce((v_first.block, v_first.position) >= (v_tick.horizon, v_tick.horizon_position), false);
  v_tick.filled := case when v_short then 0 else v_tick.filled end;
  v_refill := v_short or (v_tick.horizon is null and v_tick.filled < p_limit);
  if v_tick.horizon is null and not v_refill then
    v_tick.horizon := v_tick.top;
    v_tick.horizon_position := -9223372036854775808;
  end if;
  select a.* into v_done
  from fairq._admit(v_tick, v_heard.o_lanes, v_refill, case when v_refill then p_limit - v_tick.filled else p_limit end, v_now) a;

  if v_done.o_expired is not null then
    perform fairq._end_tasks(p_shard_no, v_done.o_expired, 'expired', null, v_now);
  end if;

  if v_short or (v_done.o_promoted > 0 and v_done.o_horizon < v_tick.horizon) then
    v_tick.refill_block := coalesce(v_done.o_middle, v_done.o_horizon);
    v_tick.refill_position := coalesce(v_done.o_middle_position, v_done.o_horizon_position);
  end if;

  -- A refill that did not get past the first lane: the server's clock was set back, and who had room by a rate or a breaker has none now. Those lanes
  -- look again, or everyone behind would wait with them.
  if v_refill and (v_done.o_horizon, v_done.o_horizon_position) = (v_tick.horizon, v_tick.horizon_position) then
    insert into fairq.rings (shard_no, queue, group_key)
    select p_shard_no, p_queue, l.group_key
    from fairq.lanes l
    where l.shard_no = p_shard_no
      and l.queue = p_queue
      and l.admissible
      and l.policy is distinct from null
      and (l.finish, l.position) >= (v_tick.horizon, v_tick.horizon_position)
    order by l.finish, l.position
    limit p_limit;
  end if;

  -- From where this pass began: of the lanes that are due it may have taken p_limit only.
  select l.look_at into v_look_at
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue
    and l.look_at >= least(v_due_at, v_now)
  order by l.look_at
  limit 1;

  v_tick.tick := v_tick.tick + 1;
  v_tick.created_at := v_now;
  v_tick.top := v_done.o_top;
  v_tick.filled := v_tick.filled + v_done.o_promoted;
  v_tick.horizon := v_done.o_horizon;
  v_tick.horizon_position := v_done.o_horizon_position;
  v_tick.next_xid := v_heard.o_next_xid;
  v_tick.pending := v_heard.o_pending;
  v_tick.heard_xid := pg_current_xact_id();
  v_tick.heard_ring := v_heard.o_heard_ring;
  v_tick.next_due_at := least(v_heard.o_next_due_at, v_look_at);
  v_tick.lane_count := v_heard.o_lane_count;
  v_tick.newcomer_position := v_heard.o_newcomer_position;
  perform fairq._write_tick(v_tick);
  return v_done.o_promoted;
end;
$$;
comment on function fairq._promote(integer, text, integer, boolean, bigint) is 'Promotes one domain.';
