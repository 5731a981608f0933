-- Promotes a queue, in all its shards: hears new rings and refills the ready set if it is short. pop_tasks does this by itself when it has to.
-- Returns the number of tasks that became ready.
-- Raises QF003 unknown queue, 42501 it is for another role, QF005 not READ COMMITTED, QF007 bad limit.
-- Locks: the domain, waits for it (see 030_tables.sql); held until the transaction ends.
create function fairq.promote_overflow(p_queue text default 'default', p_limit integer default null, p_shard_no integer default null)
returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_queue fairq.queues := fairq._queue(p_queue);
  v_shard_no integer;
  v_promoted integer := 0;
begin
  if v_queue.work_role is not null then
    perform fairq._check_role(p_queue, v_queue.work_role);
  end if;
  if p_limit is not null then
    perform fairq._check_limit(p_limit);
  end if;

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    -- Null: the shard has gone meanwhile.
    v_promoted := v_promoted + coalesce((fairq._promote(v_shard_no, p_queue, coalesce(p_limit, fairq._ready_target(v_shard_no, v_queue)), true)).o_promoted, 0);
  end loop;
  return v_promoted;
end;
$$;
comment on function fairq.promote_overflow is 'Hears new rings and moves waiting tasks into the served order. pop_tasks does this when it has to.';

-- Promotion of one domain, top to bottom. Tick in, tick out.
-- p_take tasks are handed over to the pop that calls it: o_popped, in served order, some of them from the ready set. The rest of the pass becomes ready.
-- p_used_up is the tick whose ready set the caller found used up: others are popping what is still ready before the horizon, and a pop in flight, or one whose
-- client hangs, must not keep the rest waiting. If another session has promoted since, it is ignored: callers that waited for the lock would otherwise each add
-- another ready set.
-- o_goes_on: another pass may find more, because this one moved something, or rang. o_tick is the tick it wrote.
-- p_floor: how far the hindmost of the other shards has come, see _standings.
-- Returns null when another session is at it and p_wait is false.
-- Raises QF003, QF005 (see _lock_domain).
-- A session keeps one plan of each statement, made by its first caller. So plans are pinned here as well as in the functions that call this one: callers that
-- only configure, hold or purge have reasons to let the planner choose, and would otherwise plan all of a promotion anew each time.
-- Locks: domains, then what the parts say; all until the end of the transaction.
-- Killed anywhere, the transaction rolls back and the next promotion starts from the last committed tick.
create function fairq._promote(
  p_shard_no integer, p_queue text, p_limit integer, p_wait boolean, p_used_up bigint default null, p_take integer default 0,
  p_floor bigint default null, out o_promoted integer,
  out o_popped fairq.placed[], out o_goes_on boolean, out o_tick bigint
)
language plpgsql set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
  v_now timestamptz;
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_read fairq.ticks;
  v_first record;
  v_heard record;
  v_configured text[];
  v_rung text[] := array[]::text[];
  v_is_idle boolean;
  v_served record;
begin
  if not fairq._lock_domain(p_shard_no, p_queue, p_wait) then
    return;
  end if;
  v_now := fairq._now();
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if v_tick.tick is null then
    v_tick := fairq._start_anew(p_shard_no, p_queue);
  end if;
  v_read := v_tick;

  -- First come those that this promotion itself rings, because the rings of this transaction are heard below: bodies after a rebuild, keys that came free,
  -- tasks that are due.
  if v_tick.keyed or v_tick.announce_from is not null then
    if not fairq._lock_counters(p_shard_no, '#keys', p_wait) then
      return;
    end if;
    v_tick := fairq._announce_bodies(v_tick);
    perform fairq._open_keys(p_shard_no, v_now, p_queue);
  end if;
  if v_tick.long_since is not null then
    v_tick := fairq._let_long(v_tick, p_take, v_now);
  end if;
  v_tick := fairq._wake_due(v_tick, v_now, greatest(p_limit, 1000));

  -- Hearing writes nothing, so it may be repeated, and a promotion that cannot lock the keys it hears of may leave it at that.
  v_heard := fairq._hear(v_tick, 5000);
  if (v_heard.o_tick).next_due_at <= v_now then
    -- A scheduled task heard of now is due already: it belongs into this pass, before younger tasks.
    v_tick.next_due_at := (v_heard.o_tick).next_due_at;
    v_tick := fairq._wake_due(v_tick, v_now, greatest(p_limit, 1000));
    v_heard := fairq._hear(v_tick, 5000);
  end if;
  if v_heard.o_configured then
    loop
      v_configured := array(select n.group_key from unnest(v_heard.o_news) n where n.configured and n.user_key is null and n.group_key <> all(v_rung));
      exit when '' = any(v_rung) or not fairq._ring_limited(v_tick, v_configured);
      v_rung := v_rung || v_configured;
      v_heard := fairq._hear(v_tick, 5000);
    end loop;
    v_heard.o_news := array(select n from unnest(v_heard.o_news) n where n.group_key <> '');
  end if;
  if not v_tick.keyed and (v_heard.o_tick).keyed then
    if not fairq._lock_counters(p_shard_no, '#keys', p_wait) then
      return;
    end if;
    perform fairq._open_keys(p_shard_no, v_now, p_queue);
  end if;
  v_tick := v_heard.o_tick;

  -- The clock: the first task still ready, where one that is being popped counts. With the horizon it says what is being served. From here on this promotion
  -- does not give up: addresses that are taken back and the tick that says so are written together.
  select r.block, r.position into v_first
  from fairq.ready r
  where r.shard_no = p_shard_no and r.queue = p_queue and r.position >= 0
    and (r.block, r.position) >= (v_tick.clock, v_tick.clock_position)
  order by r.block, r.position
  limit 1;
  v_tick := fairq._move_clock(v_tick, v_first.block, v_first.position, p_floor);
  if v_tick.clock > 2305843009213693952 then
    v_first.block := v_first.block - 1152921504606846976;
    v_tick := fairq._rebase(v_tick, 1152921504606846976);
  end if;

  -- Settings are read after their rings are heard. A change that commits in between is heard of by the next pass, but never heard of and not seen.
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if v_queue.spread then
    select h.* into v_heard from fairq._send_home(v_tick, v_heard.o_news, v_heard.o_cancelled) h;
  end if;
  v_is_idle := p_take > 0 and v_first.block is null and v_tick.horizon is null;
  if v_is_idle then
    select s.* into v_served from fairq._serve_at_once(v_tick, v_queue, v_heard.o_news, v_heard.o_cancelled, p_take, v_now) s;
    v_is_idle := v_served.o_promoted is not null;
  end if;
  if not v_is_idle then
    select s.* into v_served
    from fairq._serve(v_tick, v_queue, v_heard.o_news, v_heard.o_cancelled, v_first.block, v_first.position, p_limit,
      coalesce(p_used_up = v_read.tick, false), p_take, v_now) s;
  end if;
  v_tick := v_served.o_tick;
  o_popped := v_served.o_popped;
  o_promoted := v_served.o_promoted;

  -- When lanes that a rate or a breaker holds back, those of users included, have to be looked at. This pass may have taken only a part of those due now.
  v_tick.next_due_at := least(v_tick.next_due_at, (
    select min(l.look_at)
    from (values (p_queue), (case when v_tick.users then fairq._users_of(p_queue) end)) q(queue)
    cross join lateral (
      select k.look_at from fairq.lanes k
      where k.shard_no = p_shard_no and k.queue = q.queue and k.look_at >= least(v_read.next_due_at, v_now)
      order by k.look_at limit 1
    ) l
  ));
  if v_queue.short_slots is not null or v_tick.long_since is not null then
    v_tick := fairq._note_long(v_tick, v_queue, v_now);
  end if;
  o_goes_on := v_served.o_goes_on or o_promoted > 0
    or (v_tick.horizon, v_tick.horizon_position, v_tick.next_xid, v_tick.pending, v_tick.touched, v_tick.next_due_at)
      is distinct from (v_read.horizon, v_read.horizon_position, v_read.next_xid, v_read.pending, v_read.touched, v_read.next_due_at);
  o_tick := (fairq._write_tick(v_tick)).tick;
end;
$$;

-- Rings for those whose limits changed with those of p_groups. An empty name means the whole queue: every group that has a lane or something in flight. A
-- group's name means also its users who have something in flight that is to be counted from now on. The session that changed the settings could not know of
-- tasks that another promotion was just serving; here they have committed.
-- Returns whether anybody rings for that.
-- Cost: all lanes of the queue, or all held tasks of the shard. For settings, not for the hot path.
create function fairq._ring_limited(p_tick fairq.ticks, p_groups text[]) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_queue fairq.queues;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_tick.queue;
  insert into fairq.rings (shard_no, queue, group_key, user_key, configured)
  select l.shard_no, p_tick.queue, l.group_key, u.user_key, true
  from (select where '' = any(p_groups) offset 0) gate
  cross join fairq.lanes l
  cross join lateral (select null where l.queue = p_tick.queue union all select l.line where l.queue <> p_tick.queue or l.line <> '') u(user_key)
  where l.shard_no = p_tick.shard_no and l.queue in (p_tick.queue, fairq._users_of(p_tick.queue))
  union
  select h.shard_no, t.queue, t.group_key, u.user_key, true
  from (
    select array_agg(n.group_key) as groups, '' = any(p_groups) as is_all
    from unnest(p_groups) n(group_key)
    left join fairq.groups g on g.shard_no = p_tick.shard_no and g.queue = p_tick.queue and g.group_key = n.group_key and g.user_key = ''
    where n.group_key = ''
      or fairq._counts(fairq._policy(fairq._for_users(v_queue, g), null))
  ) c
  join fairq.held h on h.shard_no = p_tick.shard_no and c.groups is not null
  join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
  cross join lateral (values (null), (nullif(t.user_key, ''))) u(user_key)
  where t.queue = p_tick.queue
    and (c.is_all or u.user_key is not null and not h.user_counted and t.group_key = any(c.groups));
  return found;
end;
$$;

-- The short way: where nothing is ready and nothing waits, new tasks are handed over at once, in their turns. No lane is written for them, because all of them
-- are gone and the clock goes past them. It is open only if nothing limits the groups that rang, and all they have waiting fits into this pop.
-- Returns null if it is not: then all of them go the whole way.
-- Cost: two look-ups per group that rang, and p_take entries of tasks_line_idx.
create function fairq._serve_at_once(
  p_tick fairq.ticks, p_queue fairq.queues, p_news fairq.news[], p_cancelled bigint[], p_take integer, p_now timestamptz,
  out o_tick fairq.ticks, out o_popped fairq.placed[], out o_promoted integer, out o_goes_on boolean
)
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_short_under double precision := fairq._short_under(p_tick, p_queue);
  v_all record;
begin
  if cardinality(p_news) > p_take or p_cancelled is not null or p_tick.keyed or p_tick.users or p_queue.fairness <> 'count'
    or fairq._limits_groups(p_queue)
  then
    return;
  end if;
  select array_agg((t.id, p_tick.clock + t.start, t.nth, null, false, false, t.priority, t.sequence, t.group_key, t.attempt, t.expires_at, null, null, '',
      null, false, null)::fairq.placed order by t.start, t.nth) as tasks,
    max(t.start + t.step) as served, max(t.sequence) as touched, bool_or(t.meets_key or t.is_expired) as is_odd
  into v_all
  from (
    select x.*, (sum(x.step::double precision) over (partition by x.nth order by x.priority desc, x.sequence rows unbounded preceding))::bigint - x.step as start
    from (
      select y.*, u.group_key, u.nth
      from (select w.*, row_number() over (order by w.first_sequence) as nth from unnest(p_news) w) u
      cross join lateral fairq._next_tasks(p_tick.shard_no, p_tick.queue, u.group_key, '',
        case
          when cardinality(u.heard) = 1 then array[((u.heard[1]).priority, (u.heard[1]).sequence, p_tick.touched, false)::fairq.cursor]
          else fairq._merge_cursors(null, u.heard, p_tick.touched)
        end, p_queue.weight, null, p_take + 1, v_short_under, p_now) y
      limit p_take + 1
    ) x
  ) t;
  if coalesce(cardinality(v_all.tasks), 0) not between 1 and p_take or v_all.is_odd or exists (
    select
    from unnest(p_news) n
    left join lateral (
      select v.policy is not distinct from null and v.gate is not distinct from null and v.cursors = '{}' and v.finish <= p_tick.clock as is_plain
      from fairq.lanes v
      where v.shard_no = p_tick.shard_no and v.queue = p_tick.queue and v.group_key = n.group_key and v.user_key = '' and v.version >= p_tick.first_version
      order by v.version desc
      limit 1
    ) l on true
    where not l.is_plain
      or n.freed <> 0
      or n.configured
      or exists (
        select from fairq.groups g where g.shard_no = p_tick.shard_no and g.queue = p_tick.queue and g.group_key = n.group_key and g.user_key = '' offset 0
      )
  ) then
    return;
  end if;
  o_tick := p_tick;
  o_tick.top := greatest(p_tick.top, p_tick.clock + v_all.served);
  o_tick.touched := greatest(p_tick.touched, v_all.touched);
  o_tick.refill_block := null;
  o_tick.filled := 0;
  o_popped := v_all.tasks;
  o_promoted := cardinality(o_popped);
  o_goes_on := false;
end;
$$;

-- The whole way: lanes are settled, what may not be ready any more is recalled, and if the ready set is short, waiting tasks get addresses. p_block and
-- p_position are those of the first task still ready.
-- The ready set is short when it has not enough for this pop, or when pops have passed its middle or stand at the horizon. (The horizon may lie before the
-- middle: a lane of cheap tasks gets as many as the others and comes less far.) Then it gets p_limit more; if fewer wait, tasks that come later go on filling
-- it. Otherwise only the lanes just rung are looked at, and only for tasks before the horizon, or before the end of a full ready set.
-- Locks: lanes; ready and parked rows with "skip locked".
create function fairq._serve(
  p_tick fairq.ticks, p_queue fairq.queues, p_news fairq.news[], p_cancelled bigint[], p_block bigint, p_position bigint,
  p_limit integer, p_is_used_up boolean, p_take integer, p_now timestamptz,
  out o_tick fairq.ticks, out o_popped fairq.placed[], out o_promoted integer, out o_goes_on boolean
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_settled record;
  v_news fairq.news[] := p_news;
  v_users_configured text[];
  v_reweighted jsonb;
  v_recalled record;
  v_lanes fairq.lanes[];
  v_ready fairq.placed[] := array[]::fairq.placed[];
  v_room integer := p_take;
  v_is_short boolean;
  v_refill boolean;
  v_horizon fairq.placed;
  v_done record;
  v_rest fairq.placed[];
begin
  if p_tick.users then
    v_news := fairq._news_of_groups(p_news);
    v_users_configured := array(
      select fairq._line(n.group_key, n.user_key, true) from unnest(p_news) n where n.configured and n.user_key is not null
    );
  end if;
  select s.o_tick, s.o_lanes, array[]::fairq.lanes[] as o_users, array[]::text[] as o_disturbed, s.o_reweighted into v_settled
  from fairq._settle_lanes(p_tick, p_queue, v_news, p_now, p_cancelled is not null) s;
  v_reweighted := v_settled.o_reweighted;
  if p_tick.users then
    select s.* into v_settled from fairq._settle_users(v_settled.o_tick, p_queue, v_settled.o_lanes, p_news, p_now) s;
  end if;
  select r.* into v_recalled
  from fairq._recall(v_settled.o_tick, p_queue, v_settled.o_lanes, v_news, p_cancelled, p_now, v_settled.o_users, v_settled.o_disturbed,
    v_users_configured, v_reweighted, v_settled.o_reweighted) r;
  o_tick := v_recalled.o_tick;
  v_lanes := v_recalled.o_lanes;
  if p_cancelled is not null then
    perform fairq._cancel_waiting(o_tick.shard_no, p_cancelled, p_now);
  end if;

  -- Ready tasks that this pop may take, in order; those beyond the horizon only if it moves.
  if p_take > 0 and p_block is not null then
    v_ready := fairq._pick(o_tick, p_take, false);
    if coalesce(p_queue.group_max_running, p_queue.group_breaker_threshold) is not null then
      -- If a cap for all groups is new, this pass may not have heard of it for each of them. It leaves tasks that are not counted yet to another one, which
      -- recalls them.
      v_ready := array(select r from unnest(v_ready) r where r.counted);
    end if;
    v_room := p_take - (select count(*)::integer from unnest(v_ready) r where fairq._is_before_horizon(o_tick, r));
  end if;

  v_is_short := v_room > 0 or p_is_used_up or p_block is null or o_tick.refill_block is null
    or (p_block, p_position) >= (o_tick.refill_block, o_tick.refill_position)
    or coalesce((p_block, p_position) >= (o_tick.horizon, o_tick.horizon_position), false);
  o_tick.filled := case when v_is_short then 0 else o_tick.filled end;
  if v_is_short and p_take > 0 and p_queue.ready_target is null and p_queue.fairness = 'count' then
    p_limit := greatest(p_limit, fairq._worth_a_lane(o_tick, cardinality(v_lanes) + coalesce(cardinality(v_recalled.o_users), 0), p_take) - p_take);
  end if;
  v_refill := v_is_short or (o_tick.horizon is null and o_tick.filled < p_limit);
  if o_tick.horizon is null and not v_refill then
    o_tick.horizon := o_tick.top;
    o_tick.horizon_position := -9223372036854775808;
  end if;
  v_horizon.block := o_tick.horizon;
  v_horizon.position := o_tick.horizon_position;
  select a.* into v_done
  from fairq._admit(o_tick, p_queue, v_lanes, v_refill, case when v_refill then greatest(1, p_limit + v_room - o_tick.filled) else greatest(1000, p_limit, p_take) end,
    p_take, v_ready, p_now, v_recalled.o_users) a;
  o_tick := v_done.o_tick;
  o_promoted := coalesce(cardinality(v_done.o_placed), 0);
  o_goes_on := v_done.o_expired is not null;
  if p_queue.short_slots is not null and exists (select from unnest(v_done.o_placed) t where t.long is not true) then
    o_tick.long_since := p_now;
  end if;
  if o_goes_on then
    perform fairq._end_waiting(o_tick.shard_no, v_done.o_expired, 'expired', p_now);
  end if;
  if o_tick.keyed then
    perform fairq._take_keys_back(o_tick.shard_no, o_tick.queue, p_now);
  end if;

  -- The first p_take of all that is ready before the new horizon go to the pop; the rest of the pass becomes ready. Most often nothing was ready before, and
  -- what there is is in order already.
  if v_ready = '{}' then
    v_room := least(p_take, o_promoted);
    if v_room > 0 and not fairq._is_before_horizon(o_tick, v_done.o_placed[v_room]) then
      v_room := (select count(*)::integer from unnest(v_done.o_placed[1:v_room]) t where fairq._is_before_horizon(o_tick, t));
    end if;
    o_popped := coalesce(v_done.o_placed[1:v_room], '{}');
    v_rest := coalesce(v_done.o_placed[v_room + 1:], '{}');
  else
    select coalesce(array_agg(m.task order by m.nth) filter (where m.is_popped), '{}'),
      coalesce(array_agg(m.task order by m.nth) filter (where not m.is_popped and (m.task).ready is null), '{}')
    into o_popped, v_rest
    from (
      select n.task, n.nth, n.nth <= p_take and fairq._is_before_horizon(o_tick, n.task) as is_popped
      from (select u, row_number() over (order by u.block, u.position) from unnest(v_ready || v_done.o_placed) u) n(task, nth)
    ) m;
  end if;
  if v_rest <> '{}' then
    insert into fairq.ready (shard_no, queue, id, block, position, charge, counted, keyed_at, group_key, attempt, expires_at, long,
      user_key, user_block, user_counted)
    select o_tick.shard_no, o_tick.queue, t.id, t.block, t.position, t.charge, t.counted, case when t.keyed then p_now end, t.group_key,
      t.attempt, t.expires_at, t.long, t.user_key, t.user_block, t.user_counted
    from unnest(v_rest) t;
  end if;

  -- Where pops will have passed the middle of what is ready.
  if v_is_short or (o_promoted > 0 and (o_tick.horizon, o_tick.horizon_position) < (v_horizon.block, v_horizon.position)) then
    o_tick.refill_block := coalesce((v_rest[cardinality(v_rest) / 2 + 1]).block, o_tick.horizon);
    o_tick.refill_position := case when v_rest <> '{}' then (v_rest[cardinality(v_rest) / 2 + 1]).position else o_tick.horizon_position end;
  end if;
  o_tick.filled := o_tick.filled + cardinality(v_rest);

  -- A refill that did not get past the first lane: the server's clock was set back, and lanes that had room by a rate or a breaker have none now. They look
  -- again, or all behind them would wait with them.
  if v_refill and o_promoted = 0 and (o_tick.horizon, o_tick.horizon_position) = (v_horizon.block, v_horizon.position) then
    o_goes_on := o_goes_on or fairq._look_again(o_tick, p_limit, p_now);
  end if;
end;
$$;

-- Whether a task may be popped as things stand. Inlined.
create function fairq._is_before_horizon(p_tick fairq.ticks, p_task fairq.placed) returns boolean
language sql immutable
as $$ select (p_task.block, p_task.position) < (coalesce(p_tick.horizon, 9223372036854775807), coalesce(p_tick.horizon_position, 0)) $$;

-- Ready tasks in served order, locked for the caller, at most p_limit; with p_before_horizon only those that may be popped as things stand, with p_after
-- only those whose deadline comes after it.
-- A row that another session pops is skipped. So is one that another session popped after our snapshot: it is gone at the second look. If that session rolls
-- back, the row becomes visible again at the same address.
create function fairq._pick(p_tick fairq.ticks, p_limit integer, p_before_horizon boolean, p_after timestamptz default null) returns fairq.placed[]
language plpgsql set search_path = pg_catalog, pg_temp set enable_sort = off as $$
begin
  return coalesce((
    select array_agg((n.id, n.block, n.position, n.charge, n.counted, n.keyed_at is not null, null, null, n.group_key, n.attempt,
      n.expires_at, n.ctid, n.long, n.user_key, n.user_block, n.user_counted, null)::fairq.placed)
    from (
      select r.*, r.ctid
      from fairq.ready r
      where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
        and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
        and (r.block, r.position) < (
          case when p_before_horizon then coalesce(p_tick.horizon, 9223372036854775807) else 9223372036854775807 end, coalesce(p_tick.horizon_position, 0))
        and (r.expires_at <= p_after) is not true
      order by r.block, r.position
      limit p_limit
      for update skip locked
    ) n
  ), '{}');
end;
$$;

-- From how many tasks on it is worth writing the lanes they come from: eight of each that waits, four thousand at most; or p_take, if that is four of each
-- already. A lane costs as much as four tasks that become ready first, so where a thousand groups wait, taking one task from each would be mostly lanes.
-- Cost: five hundred entries of lanes_order_idx.
create function fairq._worth_a_lane(p_tick fairq.ticks, p_rung integer, p_take integer) returns integer
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_lanes integer := p_rung + (
    select coalesce(sum(1 + case when w.has_users then (
        select count(*)
        from (
          select
          from fairq.lanes u
          where u.shard_no = p_tick.shard_no and u.queue = fairq._users_of(p_tick.queue) and u.queue like '#users %' and u.group_key = w.group_key and u.admissible
          limit 500
        ) n
      ) else 0 end), 0)::integer
    from (
      select l.group_key, l.inside is distinct from null as has_users
      from fairq.lanes l
      where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.user_key = '' and l.admissible
        and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
      order by l.finish, l.position
      limit 500
    ) w
  );
begin
  return case when p_take >= 4 * v_lanes then p_take else least(4000, 8 * v_lanes) end;
end;
$$;

-- Rings for lanes that had room when they were written and have none now, and for such users of groups that wait.
create function fairq._look_again(p_tick fairq.ticks, p_limit integer, p_now timestamptz) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_rings boolean;
begin
  insert into fairq.rings (shard_no, queue, group_key)
  select p_tick.shard_no, p_tick.queue, l.group_key
  from fairq.lanes l
  where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.user_key = '' and l.admissible
    and l.policy is distinct from null
    and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    and (fairq._allowance(l.policy, l.gate, p_now, (l.pace).reserved)).tasks < 1
  order by l.finish, l.position
  limit greatest(p_limit, 100);
  v_rings := found;
  if p_tick.users then
    insert into fairq.rings (shard_no, queue, group_key, user_key)
    select p_tick.shard_no, p_tick.queue, w.group_key, u.user_key
    from (
      select l.group_key
      from fairq.lanes l
      where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.user_key = '' and l.admissible
        and l.inside is distinct from null
        and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
      order by l.finish, l.position
      limit greatest(p_limit, 100)
    ) w
    cross join lateral (
      select l.user_key
      from fairq.lanes l
      where l.shard_no = p_tick.shard_no and l.queue = fairq._users_of(p_tick.queue) and l.queue like '#users %' and l.group_key = w.group_key and l.admissible
        and l.policy is distinct from null
        and (fairq._allowance(l.policy, l.gate, p_now)).tasks < 1
      order by l.finish, l.position
      limit greatest(p_limit, 100)
    ) u;
    v_rings := v_rings or found;
  end if;
  return v_rings;
end;
$$;

-- Rings for lanes that a rate or a breaker held back until now, those of users included. Scheduled tasks that are due stand in line from now on, behind what
-- their groups have waiting, and ring; one that was tried before keeps its old place.
-- Returns the tick, which knows when the next one is due.
-- Locks: tasks, the scheduled rows it moves, "skip locked": retry_task in an open transaction may hold one, and is not waited for.
-- Cost: tasks_due_idx from p_tick.next_due_at on, at most p_limit rows.
create function fairq._wake_due(p_tick fairq.ticks, p_now timestamptz, p_limit integer) returns fairq.ticks
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_due tid[];
begin
  if p_tick.next_due_at is null or p_tick.next_due_at > p_now then
    return p_tick;
  end if;
  insert into fairq.rings (shard_no, queue, group_key, user_key)
  select p_tick.shard_no, p_tick.queue, l.group_key, l.user_key
  from (values (p_tick.queue), (case when p_tick.users then fairq._users_of(p_tick.queue) end)) q(queue)
  cross join lateral (
    select k.group_key, case when k.queue <> p_tick.queue then k.user_key end as user_key
    from fairq.lanes k
    where k.shard_no = p_tick.shard_no and k.queue = q.queue and k.look_at >= p_tick.next_due_at and k.look_at <= p_now
    order by k.look_at
    limit p_limit
  ) l;
  v_due := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.scheduled and t.run_at >= p_tick.next_due_at and t.run_at <= p_now
    order by t.run_at
    limit p_limit
    for update skip locked
  );
  if v_due <> '{}' then
    perform fairq._wake(p_tick.shard_no, p_tick.queue, v_due);
  end if;
  select t.run_at into p_tick.next_due_at
  from fairq.tasks t
  where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.scheduled and t.run_at >= p_tick.next_due_at
  order by t.run_at
  limit 1;
  return p_tick;
end;
$$;

-- Scheduled tasks stand in line from now on, in the order given. By ctid and no other way, see _leave.
create function fairq._wake(p_shard_no integer, p_queue text, p_ctids tid[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
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
    returning t.group_key, t.user_key, t.priority, t.sequence, t.concurrency_key
  )
  insert into fairq.rings (shard_no, queue, group_key, user_key, priority, sequence, keyed)
  select p_shard_no, p_queue, w.group_key, nullif(w.user_key, ''), w.priority, min(w.sequence), bool_or(w.concurrency_key is not null)
  from woken w
  group by w.group_key, w.user_key, w.priority;
end;
$$;
