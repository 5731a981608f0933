-- Gives addresses to waiting tasks. Whether they go straight to a worker or into the ready set is not decided here.
-- Candidates are the lanes just rung (p_lanes, not stored) and, when the ready set is short (p_refill), the waiting lanes from the last tick's horizon on. All
-- of p_lanes are written again. Expired tasks get no address; the caller ends them.
-- A task whose limit runs with time is given only to a pop that takes it now (p_take tasks; p_ready are those in order before them). So no rate is charged for
-- a task that waits, and no concurrency key is held from far back: such a lane stops at its next task, and the horizon with it.
-- Locks: lanes; the caller holds the domain, under which bodies that wait do not change.
-- Cost: O(p_budget) lanes and tasks; lanes_order_idx from the horizon, tasks_line_idx from each lane's cursor.
create function fairq._admit(
  p_tick fairq.ticks, p_queue fairq.queues, p_lanes fairq.lanes[], p_refill boolean, p_budget integer, p_take integer, p_ready fairq.placed[], p_now timestamptz,
  p_users fairq.lanes[], out o_tick fairq.ticks, out o_placed fairq.placed[], out o_expired bigint[]
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_shares fairq.share[] := fairq._share_out(p_tick, p_queue, p_lanes, p_refill, p_budget, p_take, p_ready[p_take], p_now);
  v_short_under double precision := fairq._short_under(p_tick, p_queue);
  v_inside fairq.share[] := array[]::fairq.share[];
  v_drawn fairq.drawn[];
  v_users fairq.drawn[];
  v_written record;
  v_all record;
begin
  if p_tick.users then
    select coalesce(array_agg(s) filter (where (s.lane).inside is distinct from null), '{}'),
      coalesce(array_agg(s) filter (where (s.lane).inside is not distinct from null), '{}')
    into v_inside, v_shares
    from unnest(v_shares) s;
  end if;
  v_drawn := fairq._draw(p_tick, v_shares, v_short_under, p_now);
  if v_inside <> '{}' then
    v_users := fairq._draw(p_tick, fairq._share_inside(p_tick, v_inside, p_users), v_short_under, p_now);
    v_drawn := v_drawn || fairq._merge_users(v_inside, v_users, p_now);
  end if;
  select bool_or(d.timed and d.tasks is not null) as is_timed, bool_or(d.expired is not null) as expires into v_all from unnest(v_drawn) d;
  if v_all.is_timed then
    v_drawn := fairq._cut(v_drawn, p_ready, p_take);
  end if;
  if v_inside <> '{}' then
    v_written := fairq._write_users(p_tick, v_drawn, v_users, p_now);
    p_tick := v_written.o_tick;
    v_drawn := v_written.o_drawn;
  end if;
  o_tick := fairq._write_lanes(p_tick, v_drawn, p_now);
  o_placed := (select array_agg(t order by t.block, t.position) from unnest(v_drawn) d cross join lateral unnest(d.tasks) t);
  if v_all.expires then
    o_expired := (select array_agg(e.id) from unnest(v_drawn) d cross join lateral unnest(d.expired) e(id));
  end if;
end;
$$;

-- How many tasks each lane may have. Lanes are filled like connected vessels: the level is the virtual time up to which all of them together have p_budget
-- tasks. A lane below it gets as many as fit, at least one. The prefix sums below give that level without a loop: for lanes in order of their tags, (budget +
-- sum(width * tag)) / sum(width) is smallest at the prefix that the water covers. The width of a lane is how many of its tasks fit into a round: its weight,
-- divided, where groups share what tasks use, by what its last task was expected to use. If all counted as a second each, a refill of quick tasks would raise
-- the level by minutes, and groups of slow ones would be promoted as far ahead by their first guess.
-- A lane may get fewer tasks than others already have. Then the new horizon is its next task, and pops stop there until the next refill. So the served order is
-- exact whatever the level was; the level only decides how much work a pass does.
-- p_last: with so many ready tasks before it, nothing behind it reaches this pop any more.
-- A waiting lane whose settings have changed since it was written is not served by the old ones, because the ring that tells of the change may lie behind the
-- cut of this pass. All lanes stop there, and that lane rings.
create function fairq._share_out(
  p_tick fairq.ticks, p_queue fairq.queues, p_lanes fairq.lanes[], p_refill boolean, p_budget integer, p_take integer, p_last fairq.placed, p_now timestamptz
) returns fairq.share[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_limited boolean := fairq._limits_groups(p_queue);
  v_shares fairq.share[];
begin
  with candidate as materialized (
    select c.lane, c.replaces, c.is_stale, (c.lane).admissible, fairq._rounds((c.lane).finish - p_tick.clock) as tag,
      (c.lane).weight / coalesce((((c.lane).pace).estimates[1]).used, 1) as width,
      row_number() over by_tag as nth,
      -- Row by row: of a crowd that shares one place the first hundred go.
      count(*) filter (where (c.lane).keyed) over (by_tag rows unbounded preceding) as nth_keyed
    from (
      select r as lane, null::tid as replaces, false as is_stale from unnest(p_lanes) r
      union all
      select w.lane, w.replaces, s.weight <> (w.lane).weight or s.policy is distinct from (w.lane).policy
      from (
        select l as lane, l.ctid as replaces
        from fairq.lanes l
        where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.user_key = '' and l.admissible
          and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
        order by l.finish, l.position
        limit 1 + case when p_refill then p_budget else 0 end
      ) w
      cross join lateral fairq._limits_now(p_tick.shard_no, p_queue, (w.lane).group_key, null, false, v_limited) s
    ) c
    window by_tag as (order by (c.lane).admissible desc, (c.lane).finish, (c.lane).position)
  ),
  fence as materialized (
    -- The first lane that has to wait for another pass; all behind it wait as well. Without a refill that is the first lane at the horizon or behind it, even
    -- if just rung; and the first that still has something ready where groups share what tasks use. Otherwise groups that ring all the time would be promoted
    -- ever further ahead and pay by old estimates.
    select c.nth, c.tag, c.is_stale, (c.lane).group_key
    from candidate c
    where c.admissible
      and (c.nth > p_budget
        or c.nth_keyed > 100
        or c.is_stale
        or (not p_refill and (c.replaces is not null
          or ((c.lane).finish, (c.lane).position) >= (p_tick.horizon, p_tick.horizon_position)
          or ((c.lane).pace).last_block >= p_tick.clock)))
    order by c.nth
    limit 1
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, configured)
    select p_tick.shard_no, p_tick.queue, f.group_key, true
    from fence f
    where f.is_stale
  ),
  water as (
    select min(x.level) as level, least(min(x.level), min(x.fence)) as fenced, min(x.fence_nth) as fence_nth, min(x.reach) as reach
    from (
      select (p_budget + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as level,
        (p_take + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as reach, f.tag as fence, f.nth as fence_nth
      from candidate c
      left join fence f on true
      where c.admissible
        and c.nth < coalesce(f.nth, 9223372036854775807)
      window by_tag as (order by c.nth)
    ) x
  )
  select array_agg((c.lane, c.replaces,
    case
      when c.admissible and c.tag < w.level and c.nth < coalesce(w.fence_nth, 9223372036854775807)
        then least(
          case when (c.lane).policy is distinct from null then (fairq._allowance((c.lane).policy, (c.lane).gate, p_now, ((c.lane).pace).reserved)).tasks end,
          p_budget,
          greatest(1, ceil((w.fenced - c.tag) * c.width))
        )::integer
      else 0
    end,
    -- Where this pop ends at most: for tasks that it would have to take now.
    case
      when p_take = 0 or ((c.lane).finish, (c.lane).position) >= (p_last.block, p_last.position) then p_tick.clock
      else least(p_last.block + 1, p_tick.clock + least(4e18, ceil(w.reach * fairq._round()))::bigint)
    end,
    -- How far the lane comes with what is left of its budget. The first task that finds something left goes, even if that is less than one unit of virtual
    -- time: otherwise the lane would stay at the horizon, and everybody behind it.
    case
      when ((c.lane).policy).budget is not null then (c.lane).finish + greatest(1, least(2e18,
        fairq._round() * fairq._budget_left((c.lane).policy, (c.lane).gate, ((c.lane).pace).reserved, p_now) / (c.lane).weight))::bigint
      else 9223372036854775807
    end)::fairq.share order by c.nth)
  into v_shares
  from candidate c
  left join water w on true;
  return v_shares;
end;
$$;

-- The next tasks of each lane, with their addresses, and where the lane goes on. While it has credit they lie closer together than what they are charged. In a
-- lane whose tasks have concurrency keys, or are long where slots are kept for short ones, _take_keys says which are next.
-- One pass, lanes -> lateral tasks: a join would be a nested loop, because the planner expects one row of each.
create function fairq._draw(p_tick fairq.ticks, p_shares fairq.share[], p_short_under double precision, p_now timestamptz) returns fairq.drawn[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  -- In one pass a thousand tasks may find their key taken, whatever the number of lanes.
  v_most integer := greatest(1, 1000 / greatest(2, (select count(*)::integer from unnest(p_shares) s where (s.lane).keyed and s.quota > 0)));
begin
  return (
    select array_agg((s.lane, s.replaces, s.quota, k.tasks, k.expired, k.next, coalesce(k.served, 0), k.touched, k.meets_key, k.yields,
      fairq._runs_with_time((s.lane).policy, (s.lane).gate))::fairq.drawn)
    from unnest(p_shares) s
    cross join lateral (
      select
        array_agg((n.id, (s.lane).finish + n.start, case when n.start = 0 then (s.lane).position else fairq._lane_position((s.lane).lane_no) end, n.charge,
          fairq._counts((s.lane).policy), n.keyed, n.priority, n.sequence, (s.lane).group_key, n.attempt, n.expires_at, null, n.long, (s.lane).line,
          null, false, n.cost)::fairq.placed)
          filter (where not n.is_next and not n.is_expired) as tasks,
        array_agg(n.id) filter (where n.is_expired and not n.is_next) as expired,
        (array_agg((n.priority, n.sequence, n.touched, n.is_open)::fairq.cursor) filter (where n.is_next))[1] as next,
        max(n.charged - fairq._spent(gate.credit, n.charged, n.nth)) filter (where not n.is_next) as served,
        max(n.sequence) filter (where not n.is_next) as touched,
        bool_or(n.meets_key) as meets_key,
        bool_or(n.yields) as yields
      -- "offset 0" makes this a gate before the look, not a filter behind it.
      from (select coalesce(((s.lane).pace).credit, 0) as credit where s.quota > 0 offset 0) gate
      cross join lateral (
        -- In their order: by priority, then by when they became runnable. The sum of bigints would be a numeric, and slow.
        select y.*, row_number() over line as nth, (sum(y.step::double precision) over line)::bigint as charged,
          (sum(y.step::double precision) over line)::bigint - y.step
            - fairq._spent(gate.credit, (sum(y.step::double precision) over line)::bigint - y.step, row_number() over line - 1) as start,
          bool_or(y.stops) over line or row_number() over line > s.quota
            or case when s.room < 9223372036854775807 then (s.lane).finish + (sum(y.step::double precision) over line)::bigint - y.step >= s.room else false end as is_next
        from (
          select x.*
          from fairq._next_tasks(p_tick.shard_no, p_tick.queue, (s.lane).group_key, (s.lane).line, (s.lane).cursors, (s.lane).weight, (s.lane).pace,
            s.quota + 1,
            p_short_under, p_now) x
          where not (s.lane).keyed
          union all
          select x.*
          from fairq._take_keys(p_tick, s.lane, s.quota, s.reach, s.room, v_most, p_short_under, p_now) x
          where (s.lane).keyed
        ) y
        window line as (rows unbounded preceding)
        limit s.quota + 1
      ) n
    ) k
  );
end;
$$;

-- Lanes with a rate, or with a breaker that is half open, give this pop what it takes now and nothing more: what lies behind the address at which the pop ends
-- is put back.
create function fairq._cut(p_drawn fairq.drawn[], p_ready fairq.placed[], p_take integer) returns fairq.drawn[]
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_end record;
begin
  select a.block, a.position into v_end
  from (
    select r.block, r.position from unnest(p_ready) r
    union all
    select t.block, t.position from unnest(p_drawn) d cross join lateral unnest(d.tasks) t
  ) a
  order by a.block, a.position
  offset greatest(p_take - 1, 0)
  limit 1;
  return (
    select array_agg(case
      when x.kept >= cardinality(d.tasks) is not false or not d.timed or (d.lane).keyed then d
      else (d.lane, d.replaces, d.quota, d.tasks[1:x.kept], d.expired,
        ((d.tasks[x.kept + 1]).priority, (d.tasks[x.kept + 1]).sequence, null, false)::fairq.cursor,
        (d.tasks[x.kept + 1]).block - (d.lane).finish, d.touched, d.keyed, d.yields, d.timed)::fairq.drawn
    end)
    from unnest(p_drawn) d
    cross join lateral (
      select count(*)::integer as kept
      from unnest(d.tasks) t
      where p_take > 0
        and (t.block, t.position) <= (coalesce(v_end.block, 9223372036854775807), coalesce(v_end.position, 0))
    ) x
  );
end;
$$;

-- Writes the next versions of the lanes. Their tasks are charged. Levels of higher priority are used up, the level of the next task begins with it, and lower
-- levels are untouched. Returns the tick with how far the domain has come and where pops have to stop.
create function fairq._write_lanes(p_tick fairq.ticks, p_drawn fairq.drawn[], p_now timestamptz) returns fairq.ticks
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_all record;
begin
  with written as (
    insert into fairq.lanes (shard_no, queue, group_key, user_key, line, inside, version, lane_no, finish, position, weight, keyed, policy, gate, pace, last_priority,
      last_sequence, cursors, look_at, admissible)
    select p_tick.shard_no, (d.lane).queue, (d.lane).group_key, (d.lane).user_key, (d.lane).line, (d.lane).inside, (d.lane).version + 1, (d.lane).lane_no,
      (d.lane).finish + d.served,
      case when (n.last).id is not null then fairq._lane_position((d.lane).lane_no) else (d.lane).position end,
      (d.lane).weight, (d.quota = 0 or (d.next).sequence is not null) and ((d.lane).keyed or coalesce(d.keyed, false)), (d.lane).policy, n.gate,
      case
        when (d.lane).pace is distinct from null
          then (coalesce((n.last).block, ((d.lane).pace).last_block), n.credit, ((d.lane).pace).estimates,
            ((d.lane).pace).unit, n.reserved)::fairq.pace
      end,
      coalesce((n.last).priority, (d.lane).last_priority), coalesce((n.last).sequence, (d.lane).last_sequence),
      -- Written out here: a function with a subquery would cost an executor start for every lane.
      case
        when d.quota = 0 then (d.lane).cursors
        when (d.next).sequence is null then '{}'
        when cardinality((d.lane).cursors) = 1 and not ((d.lane).cursors[1]).is_open
          then array[((d.next).priority, (d.next).sequence, greatest(((d.lane).cursors[1]).touched, d.touched), false)::fairq.cursor]
        else fairq._advance_cursors((d.lane).cursors, d.next, d.touched)
      end,
      case when d.quota = 0 then (d.lane).look_at when (d.next).sequence is not null then (a.allowance).look_at end,
      case
        when d.quota = 0 then (d.lane).admissible
        else (d.next).sequence is not null and d.yields is not true and ((d.lane).policy is null or (a.allowance).tasks > 0)
      end
    from unnest(p_drawn) d
    cross join lateral (
      select d.tasks[cardinality(d.tasks)] as last,
        case
          when (d.lane).policy is distinct from null then fairq._charge((d.lane).policy, (d.lane).gate, coalesce(cardinality(d.tasks), 0), p_now)
          else (d.lane).gate
        end as gate,
        -- The part of the charge by which the lane has not moved was paid by its credit.
        case
          when ((d.lane).pace).credit > 0
            then ((d.lane).pace).credit + d.served
              - coalesce((select sum(fairq._step(t.cost, (d.lane).weight)::double precision) from unnest(d.tasks) t), 0)::bigint
          else ((d.lane).pace).credit
        end as credit,
        case when (d.lane).pace is distinct from null then ((d.lane).pace).reserved + coalesce((select sum(t.charge) from unnest(d.tasks) t), 0) end as reserved
      offset 0
    ) n
    cross join lateral (
      select case when (d.lane).policy is distinct from null then fairq._allowance((d.lane).policy, n.gate, p_now, n.reserved) end as allowance
      offset 0
    ) a
    where d.quota > 0
      or d.replaces is null
    returning finish, position, admissible
  )
  select array_agg(d.replaces) filter (where d.quota > 0 and d.replaces is not null) as replaced, max((d.lane).finish + d.served) as top,
    max(d.touched) as touched, bool_or(d.keyed) as keyed,
    least(
      (select min(array[w.finish, w.position]) from written w where w.admissible),
      min(array[(d.lane).finish, (d.lane).position]) filter (where d.quota = 0 and d.replaces is not null)
    ) as horizon
  into v_all
  from unnest(p_drawn) d;

  p_tick.top := greatest(p_tick.top, v_all.top);
  p_tick.horizon := v_all.horizon[1];
  p_tick.horizon_position := v_all.horizon[2];
  p_tick.touched := greatest(p_tick.touched, v_all.touched);
  p_tick.keyed := p_tick.keyed or coalesce(v_all.keyed, false);
  if v_all.replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_all.replaced);
  end if;
  return p_tick;
end;
$$;

-- The next tasks of a lane none of whose tasks is known to have a concurrency key, by priority and then by when they became runnable; of each level p_limit at
-- most. The lane stops at the first task that has a key, or is long where slots are kept for short ones, and goes on as a lane with keys: such a task cannot go
-- without its key, and many of them may be parked.
-- Behind a cursor's touched everything waits. Up to it, and where long tasks are parked, a look-up by id tells what is ready, held or parked.
-- One statement, stable, without "set search_path", so that it is inlined into _draw and costs no executor start for every lane.
-- Cost: tasks_line_idx from the cursors.
create function fairq._next_tasks(
  p_shard_no integer, p_queue text, p_group_key text, p_user_key text, p_cursors fairq.cursor[], p_weight double precision, p_pace fairq.pace, p_limit integer,
  p_short_under double precision, p_now timestamptz
) returns table (id bigint, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint, keyed boolean, stops boolean,
  meets_key boolean, yields boolean, touched bigint, is_open boolean, attempt integer, expires_at timestamptz, long boolean, cost double precision)
language sql stable as $$
  select o.id, o.priority, o.sequence, o.is_expired, o.charge,
    case when o.is_expired then 0 else fairq._step(coalesce(o.charge, o.cost), p_weight) end, false,
    o.meets_key or coalesce(o.charge, o.cost) > p_short_under, o.meets_key or coalesce(o.charge, o.cost) > p_short_under, false, c.touched, c.is_open,
    o.attempt, o.expires_at, null::boolean, coalesce(o.charge, o.cost)
  from unnest(p_cursors) c
  cross join lateral (
    select t.id, t.priority, t.sequence, t.cost, t.attempt + 1 as attempt, t.expires_at, t.expires_at is not null and t.expires_at <= p_now as is_expired,
      case when (p_pace).unit <> 'count' then fairq._expected(p_pace, t.kind, t.cost, p_weight) end as charge,
      t.concurrency_key is not null as meets_key
    from fairq.tasks t
    where t.shard_no = p_shard_no and t.queue = p_queue and t.group_key = p_group_key and t.user_key = p_user_key and not t.scheduled
      and (-t.priority, t.sequence) >= (-c.priority, c.sequence)
      and -t.priority <= case when c.is_open then 2147483647 else -c.priority end
      and ((t.sequence > c.touched and p_short_under = 'infinity') or t.concurrency_key is not null or not exists (select from fairq._taken(p_shard_no, t.id)))
    order by -t.priority, t.sequence
    limit p_limit
  ) o
$$;

-- The cursors of a lane of several levels once its tasks before p_next are taken, up to the sequence p_taken.
create function fairq._advance_cursors(p_cursors fairq.cursor[], p_next fairq.cursor, p_taken bigint) returns fairq.cursor[]
language sql immutable as $$
  -- A task that was given a place may be taken before its turn, from any level (see _take_keys), so all levels learn of it.
  select array_agg(
    case
      when u.priority = p_next.priority or (u.is_open and u.priority > p_next.priority)
        then (p_next.priority, p_next.sequence, greatest(u.touched, p_taken), u.is_open)::fairq.cursor
      else (u.priority, u.sequence, greatest(u.touched, p_taken), u.is_open)::fairq.cursor
    end order by u.priority desc)
  from unnest(p_cursors) u
  where u.is_open
    or u.priority <= p_next.priority
$$;
