-- Promotes a queue, in all its shards: hears new rings and refills the ready set if it is short. pop_tasks does this by itself when it has to.
-- Returns the number of tasks that became ready.
-- Raises QF003 unknown queue, QF005 not READ COMMITTED, QF007 bad limit.
-- Locks: the domain, waits for it (see 030_tables.sql); held until the transaction ends.
create function fairq.promote_overflow(p_queue text default 'default', p_limit integer default null, p_shard_no integer default null)
returns integer
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_queue fairq.queues;
  v_shard_no integer;
  v_promoted integer := 0;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_queue and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  if p_limit is not null then
    perform fairq._check_limit(p_limit);
  end if;

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    v_promoted := v_promoted + (fairq._promote(v_shard_no, p_queue, coalesce(p_limit, fairq._ready_target(v_shard_no, v_queue)), true)).o_promoted;
  end loop;
  return v_promoted;
end;
$$;
comment on function fairq.promote_overflow is 'Hears new rings and moves waiting tasks into the served order. pop_tasks does this when it has to.';

-- Promotion of one domain, top to bottom. Tick in, tick out.
-- p_take tasks are handed over to the pop that calls it: o_popped, in served order, some of them from the ready set. The rest of the pass becomes ready.
-- p_used_up is the tick whose ready set the caller found used up: what is still ready before the horizon is being popped by others, and a pop
-- in flight, or one whose client hangs, must not keep the rest waiting. Who promoted since has seen to it: callers that waited for the lock
-- would each add another ready set.
-- o_goes_on: it ended expired tasks, or rang lanes, and another pass may find what was behind them.
-- Returns null when another session is at it and p_wait is false.
-- Raises QF003, QF005 (see _lock_domain).
-- Locks: domains, then what the parts say; all until the end of the transaction.
-- Killed anywhere, the transaction rolls back and the next promotion starts from the last committed tick.
create function fairq._promote(
  p_shard_no integer, p_queue text, p_limit integer, p_wait boolean, p_used_up bigint default null, p_take integer default 0, out o_promoted integer,
  out o_popped fairq.placed[], out o_goes_on boolean
)
language plpgsql set search_path = '' as $$
declare
  v_now timestamptz;
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_read fairq.ticks;
  v_first record;
  v_heard record;
  v_settled record;
  v_lanes fairq.lanes[];
  v_ready fairq.placed[] := array[]::fairq.placed[];
  v_rest fairq.placed[];
  v_room integer;
  v_is_short boolean;
  v_refill boolean;
  v_horizon fairq.placed;
  v_done record;
begin
  if not fairq._lock_domain(p_shard_no, p_queue, p_wait) then
    return;
  end if;
  v_now := fairq._now();
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if v_tick.tick is null then
    v_tick := fairq._start_anew(p_shard_no, p_queue);
  end if;
  v_read := v_tick;

  -- What rings by itself comes first, for the rings of this transaction are heard below: bodies after a rebuild, keys that came free, what is due.
  v_tick := fairq._announce_bodies(v_tick);
  if v_tick.keyed then
    if not fairq._lock_keys(p_shard_no, p_wait) then
      return;
    end if;
    perform fairq._open_keys(p_shard_no, v_now);
  end if;
  v_tick.next_due_at := fairq._wake_due(v_tick, v_now, greatest(p_limit, 1000));

  -- The clock: the first task still ready, one that is being popped counts, too. With the horizon it says what is being served.
  select f.o_block as block, f.o_position as position into v_first from fairq._first_ready(v_tick) f;
  v_tick := fairq._move_clock(v_tick, v_first.block, v_first.position);
  if v_tick.clock > 2305843009213693952 then
    v_first.block := v_first.block - v_tick.clock;
    v_tick := fairq._rebase(v_tick, v_tick.clock);
  end if;

  -- Hearing writes nothing: it may be done again, and who cannot have the keys that he hears of now leaves it at that.
  v_heard := fairq._hear_enough(v_tick);
  if (v_heard.o_tick).next_due_at <= v_now then
    -- A schedule heard of now that is due already: what it wakes belongs into this pass, before younger tasks.
    v_tick.next_due_at := (v_heard.o_tick).next_due_at;
    v_tick.next_due_at := fairq._wake_due(v_tick, v_now, greatest(p_limit, 1000));
    v_heard := fairq._hear_enough(v_tick);
  end if;
  if not v_tick.keyed and exists (select from unnest(v_heard.o_news) n where n.keyed) then
    if not fairq._lock_keys(p_shard_no, p_wait) then
      return;
    end if;
    perform fairq._open_keys(p_shard_no, v_now);
  end if;
  select s.* into v_settled from fairq._settle_lanes(v_heard.o_tick, v_queue, v_heard.o_news, v_now) s;
  v_tick := v_settled.o_tick;
  v_lanes := fairq._recall(v_tick, v_settled.o_lanes, v_heard.o_news, v_heard.o_cancelled, v_now);
  if v_heard.o_cancelled is not null then
    perform fairq._cancel_waiting(p_shard_no, v_heard.o_cancelled, v_now);
  end if;

  -- Ready tasks this pop may take, in order; those beyond the horizon only if it moves.
  if p_take > 0 then
    v_ready := fairq._pick(v_tick, p_take, false);
  end if;
  v_room := p_take - (
    select count(*)::integer
    from unnest(v_ready) r
    where (r.block, r.position) < (coalesce(v_tick.horizon, 9223372036854775807), coalesce(v_tick.horizon_position, 0))
  );

  -- The ready set is short when it has not enough for this pop, when pops have passed its middle, or stand at the horizon, which may lie before it: a
  -- lane of cheap tasks gets as many tasks as the others and comes less far. Then it gets p_limit more; when nothing waits for that many, what comes later
  -- goes on filling it. Otherwise only the lanes just rung are looked at, and only for what comes before the horizon, or before the end of a ready set
  -- that is full.
  v_is_short := v_room > 0 or coalesce(p_used_up = v_read.tick, false) or v_first.block is null or v_tick.refill_block is null
    or (v_first.block, v_first.position) >= (v_tick.refill_block, v_tick.refill_position)
    or coalesce((v_first.block, v_first.position) >= (v_tick.horizon, v_tick.horizon_position), false);
  v_tick.filled := case when v_is_short then 0 else v_tick.filled end;
  if v_is_short and p_take > 0 and v_queue.ready_target is null and v_queue.fairness = 'count' then
    p_limit := greatest(p_limit, fairq._worth_a_lane(v_tick, cardinality(v_settled.o_lanes), p_take) - p_take);
  end if;
  v_refill := v_is_short or (v_tick.horizon is null and v_tick.filled < p_limit);
  if v_tick.horizon is null and not v_refill then
    v_tick.horizon := v_tick.top;
    v_tick.horizon_position := -9223372036854775808;
  end if;
  v_horizon.block := v_tick.horizon;
  v_horizon.position := v_tick.horizon_position;
  select a.* into v_done
  from fairq._admit(v_tick, v_lanes, v_refill, case when v_refill then greatest(1, p_limit + v_room - v_tick.filled) else greatest(1000, p_limit, p_take) end,
    p_take, v_ready, v_now) a;
  v_tick := v_done.o_tick;
  o_goes_on := v_done.o_expired is not null;
  if o_goes_on then
    perform fairq._end_tasks(p_shard_no, v_done.o_expired, 'expired', null, v_now);
  end if;
  if v_tick.keyed then
    perform fairq._take_keys_back(p_shard_no, p_queue, v_now);
  end if;

  -- The first p_take of all that is ready before the new horizon go to the pop, the rest of the pass becomes ready.
  select m.popped, m.rest into o_popped, v_rest
  from fairq._merge(v_ready, v_done.o_placed, p_take, v_tick.horizon, v_tick.horizon_position) m;
  perform fairq._place(v_tick, v_rest);
  o_promoted := coalesce(cardinality(v_done.o_placed), 0);

  -- Where pops will have passed the middle of what is ready.
  if v_is_short or (o_promoted > 0 and (v_tick.horizon, v_tick.horizon_position) < (v_horizon.block, v_horizon.position)) then
    v_tick.refill_block := coalesce((v_rest[cardinality(v_rest) / 2 + 1]).block, v_tick.horizon);
    v_tick.refill_position := case when v_rest <> '{}' then (v_rest[cardinality(v_rest) / 2 + 1]).position else v_tick.horizon_position end;
  end if;
  v_tick.filled := v_tick.filled + coalesce(cardinality(v_rest), 0);
  v_tick.next_due_at := least(v_tick.next_due_at, fairq._next_look(v_read, v_now));

  -- A refill that did not get past the first lane: the server's clock was set back, and who had room by a rate or a breaker has none now. Those lanes
  -- look again, or everyone behind would wait with them.
  if v_refill and o_promoted = 0 and (v_tick.horizon, v_tick.horizon_position) = (v_horizon.block, v_horizon.position) then
    o_goes_on := o_goes_on or fairq._look_again(v_tick, p_limit, v_now);
  end if;
  perform fairq._write_tick(v_tick);
end;
$$;

-- The first task that is ready. For enable_sort see _pick.
create function fairq._first_ready(p_tick fairq.ticks, out o_block bigint, out o_position bigint)
language sql set search_path = '' set enable_sort = off as $$
  select r.block, r.position
  from fairq.ready r
  where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
    and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
  order by r.block, r.position
  limit 1
$$;

-- Ready tasks in served order, locked for the caller, at most p_limit; with p_before_horizon only those that may be popped as things stand.
-- A row that another session pops is skipped; one that another session popped after our snapshot is gone at the second look and is skipped too; one
-- whose popper rolls back becomes visible again at the same address.
-- enable_sort is off: the rows come in the order of an index. To a table that was analyzed while it was empty, another index with a sort behind it
-- looks cheaper, and reads all of it.
create function fairq._pick(p_tick fairq.ticks, p_limit integer, p_before_horizon boolean) returns fairq.placed[]
language plpgsql set search_path = '' set enable_sort = off as $$
begin
  return coalesce((
    select array_agg((n.id, n.block, n.position, n.charge, n.counted, n.keyed, n.priority, n.sequence, n.group_key, n.ctid)::fairq.placed)
    from (
      select r.ctid, r.id, r.block, r.position, r.charge, r.counted, r.keyed, r.priority, r.sequence, r.group_key
      from fairq.ready r
      where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
        and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
        and (r.block, r.position) < (
          case when p_before_horizon then coalesce(p_tick.horizon, 9223372036854775807) else 9223372036854775807 end, coalesce(p_tick.horizon_position, 0))
      order by r.block, r.position
      limit p_limit
      for update skip locked
    ) n
  ), '{}');
end;
$$;

-- Ready tasks and those just given an address, in served order: the first p_take before the horizon are popped, of the others the new ones become ready.
create function fairq._merge(p_ready fairq.placed[], p_placed fairq.placed[], p_take integer, p_horizon bigint, p_horizon_position bigint)
returns table (popped fairq.placed[], rest fairq.placed[])
language plpgsql immutable rows 1 set search_path = '' as $$
begin
  -- Most often one of the two is all there is, and in order already.
  if p_take = 0 then
    return query select '{}'::fairq.placed[], coalesce(p_placed, '{}');
  elsif p_ready = '{}' and p_horizon is null then
    return query select coalesce(p_placed[1:p_take], '{}'), coalesce(p_placed[p_take + 1:], '{}');
  else
    return query
      select
        coalesce(array_agg(m.task order by m.nth) filter (where m.is_popped), '{}'),
        coalesce(array_agg(m.task order by m.nth) filter (where not m.is_popped and m.is_new), '{}')
      from (
        select a.task, a.is_new, a.nth,
          a.nth <= p_take and ((a.task).block, (a.task).position) < (coalesce(p_horizon, 9223372036854775807), coalesce(p_horizon_position, 0)) as is_popped
        from (
          select u.task, u.is_new, row_number() over (order by (u.task).block, (u.task).position) as nth
          from (
            select r as task, false as is_new from unnest(p_ready) r
            union all
            select n as task, true as is_new from unnest(p_placed) n
          ) u
        ) a
      ) m;
  end if;
end;
$$;

-- Puts tasks with an address into the ready set.
create function fairq._place(p_tick fairq.ticks, p_tasks fairq.placed[]) returns void
language plpgsql set search_path = '' as $$
begin
  if p_tasks <> '{}' then
    insert into fairq.ready (shard_no, queue, id, block, position, charge, counted, keyed, priority, sequence, group_key)
    select p_tick.shard_no, p_tick.queue, t.id, t.block, t.position, t.charge, t.counted, t.keyed, t.priority, t.sequence, t.group_key
    from unnest(p_tasks) t;
  end if;
end;
$$;

-- How many tasks make it worth to write the lanes they come from: eight of each that waits, four thousand at most; p_take, where those are four of each
-- already. A lane costs as much as four tasks that become ready first, so where a thousand groups wait, taking one task from each would be mostly lanes.
-- Cost: five hundred entries of lanes_order_idx.
create function fairq._worth_a_lane(p_tick fairq.ticks, p_rung integer, p_take integer) returns integer
language plpgsql stable set search_path = '' as $$
declare
  v_lanes integer := p_rung + (
    select count(*)::integer
    from (
      select
      from fairq.lanes l
      where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.admissible
        and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
      order by l.finish, l.position
      limit 500
    ) w
  );
begin
  return case when p_take >= 4 * v_lanes then p_take else least(4000, 8 * v_lanes) end;
end;
$$;

-- When lanes that a rate or a breaker holds back want to be looked at; of those that are due now this pass may have taken a part.
create function fairq._next_look(p_tick fairq.ticks, p_now timestamptz) returns timestamptz
language plpgsql stable set search_path = '' as $$
begin
  return (
    select l.look_at
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue
      and l.look_at >= least(p_tick.next_due_at, p_now)
    order by l.look_at
    limit 1
  );
end;
$$;

-- Rings lanes that had room when they were written and have none now.
create function fairq._look_again(p_tick fairq.ticks, p_limit integer, p_now timestamptz) returns boolean
language plpgsql set search_path = '' as $$
begin
  insert into fairq.rings (shard_no, queue, group_key)
  select p_tick.shard_no, p_tick.queue, l.group_key
  from fairq.lanes l
  where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.admissible
    and l.policy is distinct from null
    and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    and (fairq._allowance(l.policy, l.gate, p_now)).tasks < 1
  order by l.finish, l.position
  limit greatest(p_limit, 100);
  return found;
end;
$$;

-- Lanes that a rate or a breaker held back until now ring. Scheduled tasks that are due stand in line from now on, behind what their groups have
-- waiting, and ring; one that was tried before keeps its old place.
-- Returns when the next one is due.
-- Locks: tasks, the scheduled rows it moves, "skip locked": retry_task in somebody's open transaction may hold one, and is not waited for.
-- Cost: tasks_due_idx from p_tick.next_due_at on, at most p_limit rows.
create function fairq._wake_due(p_tick fairq.ticks, p_now timestamptz, p_limit integer) returns timestamptz
language plpgsql set search_path = '' as $$
declare
  v_ctids tid[];
begin
  if p_tick.next_due_at is null or p_tick.next_due_at > p_now then
    return p_tick.next_due_at;
  end if;
  insert into fairq.rings (shard_no, queue, group_key)
  select p_tick.shard_no, p_tick.queue, l.group_key
  from fairq.lanes l
  where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.look_at >= p_tick.next_due_at and l.look_at <= p_now
  order by l.look_at
  limit p_limit;

  v_ctids := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.scheduled and t.run_at >= p_tick.next_due_at and t.run_at <= p_now
    order by t.run_at
    limit p_limit
    for update skip locked
  );
  if v_ctids <> '{}' then
    perform fairq._wake(p_tick.shard_no, p_tick.queue, v_ctids);
  end if;
  return (
    select t.run_at
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.scheduled and t.run_at >= p_tick.next_due_at
    order by t.run_at
    limit 1
  );
end;
$$;

-- By ctid and no other way, see _leave.
create function fairq._wake(p_shard_no integer, p_queue text, p_ctids tid[]) returns void
language plpgsql set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
begin
  with numbered as materialized (
    select d.ctid, nextval('fairq.task_ids') as sequence from unnest(p_ctids) d(ctid)
  ),
  woken as (
    update fairq.tasks t
    set scheduled = false, sequence = case when t.attempt = 0 then n.sequence else t.sequence end
    from numbered n
    where t.shard_no = p_shard_no
      and t.ctid = n.ctid
    returning t.group_key, t.priority, t.sequence, t.concurrency_key
  )
  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
  select p_shard_no, p_queue, w.group_key, w.priority, min(w.sequence), bool_or(w.concurrency_key is not null)
  from woken w
  group by w.group_key, w.priority;
end;
$$;
