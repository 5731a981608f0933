-- Gives addresses to waiting tasks. Where they go, straight to a worker or into the ready set, is not decided here.
--
-- Candidates are the lanes just rung (p_lanes, not stored) and, when the ready set is short (p_refill), the waiting lanes from the last
-- tick's horizon on. They are filled like connected vessels: the level is the virtual time up to which all of them together have
-- p_budget tasks; a lane below it gets as many as fit, at least one. The prefix sums below give that level without a loop: for lanes in order of
-- their tags, (budget + sum(width * tag)) / sum(width) is smallest at the prefix that the water covers. The width of a lane is how many of its
-- tasks fit into a round: its weight; where groups share time, by the seconds that its last task was expected to take. Counted as a second each, a
-- refill of quick tasks would raise the level by minutes, and promote groups of slow ones as far ahead by their first guess.
--
-- A lane may get fewer tasks than others already have, and then the new horizon is its next task: pops stop there until the next
-- refill. So the served order is exact whatever the level was; the level only decides how much work a pass does.
--
-- What has a limit that runs with time is only given to a pop that takes it now (p_take tasks, p_ready being those in order before). A rate is charged
-- for nothing that waits, a concurrency key is not held from far back: such a lane stops at its next task, and the horizon with it.
--
-- One pass, lanes -> lateral tasks, and the new lane versions from the same rows: a join between these CTEs would be a nested loop, because
-- the planner expects one row of each.
--
-- How many tasks a lane with limits may have, says _allowance, what they use up, _charge. In a lane whose tasks have concurrency keys,
-- _take_keys says which are next, and passes over those whose key is taken.
-- p_lanes are all written again. Expired tasks get no address; the caller ends them.
-- Locks: lanes; the caller holds the domain, under which bodies that wait do not change.
-- Cost: O(p_budget) lanes and tasks; lanes_order_idx from the horizon, tasks_line_idx from each lane's cursor.
create function fairq._admit(
  p_tick fairq.ticks, p_lanes fairq.lanes[], p_refill boolean, p_budget integer, p_take integer, p_ready fairq.placed[], p_now timestamptz,
  out o_tick fairq.ticks, out o_placed fairq.placed[], out o_expired bigint[]
)
language plpgsql set search_path = '' as $$
declare
  v_replaced tid[];
  v_touched bigint;
  v_keyed boolean;
  -- With so many ready tasks before it, nothing reaches this pop any more.
  v_last fairq.placed := p_ready[p_take];
begin
  o_tick := p_tick;
  with waiting as (
    select l.ctid as replaces, l.lane_no, l.version, l.finish, l.position, l.weight, l.last_priority, l.last_sequence, l.look_at,
      l.admissible, l.keyed, l.group_key, l.cursors, l.policy, l.gate, l.pace
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.admissible
      and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    order by l.finish, l.position
    limit 1 + case when p_refill then p_budget else 0 end
  ),
  candidate as materialized (
    select c.*, fairq._rounds(c.finish - p_tick.clock) as tag,
      c.weight / coalesce(((c.pace).estimates[1]).seconds, 1) as width,
      row_number() over (order by c.admissible desc, c.finish, c.position) as nth
    from (
      select null::tid as replaces, r.lane_no, r.version, r.finish, r.position, r.weight, r.last_priority, r.last_sequence, r.look_at,
        r.admissible, r.keyed, r.group_key, r.cursors, r.policy, r.gate, r.pace
      from unnest(p_lanes) r
      union all
      select w.* from waiting w
    ) c
  ),
  fence as materialized (
    -- The first lane that has to wait for another pass, and with it whatever comes after. Without a refill that is whoever stands at the
    -- horizon or behind it, lanes just rung as well, and who shares time and still has something ready: groups that ring all the time would
    -- be promoted ever further ahead, and pay for it by old estimates.
    select c.nth, c.tag
    from candidate c
    where c.admissible
      and (c.nth > p_budget
        or (not p_refill and (c.replaces is not null
          or (c.finish, c.position) >= (p_tick.horizon, p_tick.horizon_position)
          or (c.pace).last_block >= p_tick.clock)))
    order by c.nth
    limit 1
  ),
  water as materialized (
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
  ),
  share as (
    select c.*,
      case
        when c.admissible and c.tag < w.level and c.nth < coalesce(w.fence_nth, 9223372036854775807)
          then least(
            case when c.policy is distinct from null then (fairq._allowance(c.policy, c.gate, p_now)).tasks end,
            p_budget,
            greatest(1, ceil((w.fenced - c.tag) * c.width))
          )::integer
        else 0
      end as quota,
      (c.policy).rate_seconds is not null as is_rated,
      -- Where this pop ends, at most, for what it would have to take now.
      case
        when p_take = 0 or (c.finish, c.position) >= (v_last.block, v_last.position) then p_tick.clock
        else least(v_last.block + 1, p_tick.clock + least(4e18, ceil(w.reach * fairq._round()))::bigint)
      end as reach
    from candidate c
    left join water w on true
  ),
  found as materialized (
    select s.replaces, s.lane_no, s.version, s.finish, s.position, s.weight, s.last_priority, s.last_sequence, s.look_at, s.admissible,
      s.keyed, s.group_key, s.cursors, s.quota, s.policy, s.gate, s.pace, s.is_rated, k.tasks, k.expired, k.next, k.served, k.touched, k.meets_key, k.yields
    from share s
    left join lateral (
      select
        array_agg((n.id, s.finish + n.start, case when n.start = 0 then s.position else fairq._lane_position(s.lane_no) end, n.charge,
          fairq._counts(s.policy), n.keyed, n.priority, n.sequence, s.group_key, null)::fairq.placed) filter (where n.is_taken) as tasks,
        array_agg(n.id) filter (where n.is_expired and not n.is_next) as expired,
        (array_agg((n.priority, n.sequence, n.touched, n.is_open)::fairq.cursor) filter (where n.is_next))[1] as next,
        max(n.start + n.step) filter (where not n.is_next) as served,
        max(n.sequence) filter (where not n.is_next) as touched,
        bool_or(n.meets_key) as meets_key,
        bool_or(n.yields) as yields
      from (
        select t.*, not t.is_expired and not t.is_next as is_taken
        from (
          select y.*, (sum(y.step) over line - y.step)::bigint as start, bool_or(y.stops) over line or row_number() over line > s.quota as is_next
          from (
            select x.*
            from fairq._next_tasks(p_tick.shard_no, p_tick.queue, s.group_key, s.cursors, s.weight, s.pace, s.quota + 1, p_now) x
            where not s.keyed
            union all
            select x.*
            from fairq._take_keys(p_tick, s.group_key, s.cursors, s.weight, s.pace, s.quota, s.finish, s.reach, s.is_rated, p_now) x
            where s.keyed
          ) y
          window line as (order by y.priority desc, y.sequence rows unbounded preceding)
          limit s.quota + 1
        ) t
      ) n
    ) k on s.quota > 0
  ),
  cut as materialized (
    -- The address at which this pop ends.
    select a.block, a.position
    from (
      select r.block, r.position from unnest(p_ready) r
      union all
      select t.block, t.position
      from found f
      cross join lateral unnest(f.tasks) t
      where exists (select from found g where g.is_rated and g.quota > 0)
    ) a
    order by a.block, a.position
    offset greatest(p_take - 1, 0)
    limit 1
  ),
  chunk as materialized (
    select f.replaces, f.lane_no, f.version, f.finish, f.position, f.weight, f.last_priority, f.last_sequence, f.look_at, f.admissible,
      f.keyed or coalesce(f.meets_key, false) as keyed, f.group_key, f.cursors, f.quota, f.policy, f.touched, f.expired, coalesce(f.yields, false) as yields,
      case when f.policy is distinct from null then fairq._charge(f.policy, f.gate, coalesce(x.kept, 0), p_now) else f.gate end as gate,
      fairq._last_block(f.pace, (f.tasks[x.kept]).block) as pace,
      case when x.is_cut then f.tasks[1:x.kept] else f.tasks end as tasks,
      f.tasks[x.kept] as last,
      case when x.is_cut then (f.tasks[x.kept + 1]).block - f.finish else coalesce(f.served, 0) end as served,
      case
        when x.is_cut then ((f.tasks[x.kept + 1]).priority, (f.tasks[x.kept + 1]).sequence, null, false)::fairq.cursor
        else f.next
      end as next
    from found f
    cross join lateral (
      select c.kept, c.kept < coalesce(cardinality(f.tasks), 0) as is_cut
      from (
        select case
          when not f.is_rated or f.keyed or f.tasks is null then coalesce(cardinality(f.tasks), 0)
          when p_take = 0 then 0
          else (
            select count(*)::integer
            from unnest(f.tasks) t
            where (t.block, t.position) <= (coalesce((select u.block from cut u), 9223372036854775807), coalesce((select u.position from cut u), 0))
          )
        end as kept
        offset 0
      ) c
      offset 0
    ) x
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, keyed, policy, gate, pace, last_priority,
      last_sequence, cursors, look_at, admissible)
    select p_tick.shard_no, p_tick.queue, c.group_key, c.version + 1, c.lane_no, c.finish + c.served,
      case when (c.last).id is not null then fairq._lane_position(c.lane_no) else c.position end,
      c.weight, c.keyed, c.policy, c.gate, c.pace,
      coalesce((c.last).priority, c.last_priority), coalesce((c.last).sequence, c.last_sequence),
      -- Higher priorities are used up, the level of the next task begins with it, lower ones are untouched. Written out here:
      -- a function with a subquery would cost an executor start for every lane.
      case
        when c.quota = 0 then c.cursors
        when (c.next).sequence is null then '{}'
        when cardinality(c.cursors) = 1 and not (c.cursors[1]).is_open
          then array[((c.next).priority, (c.next).sequence, greatest((c.cursors[1]).touched, c.touched), false)::fairq.cursor]
        else fairq._advance_cursors(c.cursors, c.next, c.touched)
      end,
      case when c.quota = 0 then c.look_at when (c.next).sequence is not null then (a.allowance).look_at end,
      case when c.quota = 0 then c.admissible else (c.next).sequence is not null and not c.yields and (c.policy is null or (a.allowance).tasks > 0) end
    from chunk c
    cross join lateral (
      select case when c.policy is distinct from null then fairq._allowance(c.policy, c.gate, p_now) end as allowance
      offset 0
    ) a
    where c.quota > 0
      or c.replaces is null
    returning finish, position, admissible
  ),
  horizon as materialized (
    select h.finish, h.position
    from (
      select w.finish, w.position from written w where w.admissible
      union all
      select c.finish, c.position from chunk c where c.replaces is not null and c.quota = 0
    ) h
    order by h.finish, h.position
    limit 1
  )
  select (select greatest(p_tick.top, max(c.finish + c.served)) from chunk c),
    (select h.finish from horizon h), (select h.position from horizon h),
    (select array_agg(e.id) from chunk c cross join lateral unnest(c.expired) e(id)),
    (select array_agg(c.replaces) from chunk c where c.replaces is not null and c.quota > 0),
    (select array_agg(t order by t.block, t.position)
      from chunk c
      cross join lateral unnest(c.tasks) t),
    (select max(c.touched) from chunk c), (select bool_or(c.keyed) from chunk c)
  into o_tick.top, o_tick.horizon, o_tick.horizon_position, o_expired, v_replaced, o_placed, v_touched, v_keyed;

  o_tick.top := coalesce(o_tick.top, p_tick.top);
  o_tick.touched := greatest(p_tick.touched, v_touched);
  o_tick.keyed := p_tick.keyed or coalesce(v_keyed, false);
  if v_replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_replaced);
  end if;
end;
$$;

-- The next tasks of a lane none of whose tasks is known to have a concurrency key, in order of priority and of becoming runnable; of each level p_limit
-- at most. At one that has a key the lane stops: it committed after its ring was looked for, and without its key nothing may be done with it.
-- Behind a cursor's touched everything waits; up to it a look-up by id tells what is ready, held or parked.
-- One statement, stable, without "set search_path": so it is inlined into _admit, and costs no executor start for every lane.
-- Cost: tasks_line_idx from the cursors.
create function fairq._next_tasks(
  p_shard_no integer, p_queue text, p_group_key text, p_cursors fairq.cursor[], p_weight double precision, p_pace fairq.pace, p_limit integer,
  p_now timestamptz
) returns table (id bigint, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint, keyed boolean, stops boolean,
  meets_key boolean, yields boolean, touched bigint, is_open boolean)
language sql stable as $$
  select o.id, o.priority, o.sequence, o.is_expired, o.charge,
    case when o.is_expired then 0 else fairq._step(coalesce(o.charge, o.cost), p_weight) end, false, o.meets_key, o.meets_key, false, c.touched, c.is_open
  from unnest(p_cursors) c
  cross join lateral (
    select t.id, t.priority, t.sequence, t.cost, t.expires_at is not null and t.expires_at <= p_now as is_expired,
      case when p_pace is distinct from null then fairq._expected(p_pace, t.kind, t.cost) end as charge,
      t.concurrency_key is not null as meets_key
    from fairq.tasks t
    where t.shard_no = p_shard_no and t.queue = p_queue and t.group_key = p_group_key and not t.scheduled and t.priority = c.priority
      and t.sequence >= c.sequence
      and (t.sequence > c.touched or fairq._is_waiting(p_shard_no, t.id))
    order by t.sequence
    limit p_limit
  ) o
  union all
  -- Only a lane with more levels than it keeps cursors for: "offset 0" is the gate.
  select o.id, o.priority, o.sequence, o.is_expired, o.charge,
    case when o.is_expired then 0 else fairq._step(coalesce(o.charge, o.cost), p_weight) end, false, o.meets_key, o.meets_key, false, c.touched, true
  from (select l.* from unnest(p_cursors) l where l.is_open offset 0) c
  cross join lateral (
    select t.id, t.priority, t.sequence, t.cost, t.expires_at is not null and t.expires_at <= p_now as is_expired,
      case when p_pace is distinct from null then fairq._expected(p_pace, t.kind, t.cost) end as charge,
      t.concurrency_key is not null as meets_key
    from fairq.tasks t
    where t.shard_no = p_shard_no and t.queue = p_queue and t.group_key = p_group_key and not t.scheduled and t.priority < c.priority
      and (t.sequence > c.touched or fairq._is_waiting(p_shard_no, t.id))
    order by t.priority desc, t.sequence
    limit p_limit
  ) o
$$;

-- Whether a task in line waits: nobody has it, and it is neither ready nor parked.
-- "offset 0" keeps each of these a look-up of one id: as an anti join it could become a walk through all of the table.
create function fairq._is_waiting(p_shard_no integer, p_id bigint) returns boolean
language sql stable as $$
  select not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = p_id offset 0)
    and not exists (select from fairq.ready r where r.shard_no = p_shard_no and r.id = p_id offset 0)
    and not exists (select from fairq.parked k where k.shard_no = p_shard_no and k.id = p_id offset 0)
$$;

-- The cursors of a lane of several levels once its tasks before p_next are taken, up to the sequence p_taken.
create function fairq._advance_cursors(p_cursors fairq.cursor[], p_next fairq.cursor, p_taken bigint) returns fairq.cursor[]
language sql immutable as $$
  select array_agg(
    case
      when u.is_open and u.priority >= p_next.priority then (p_next.priority, p_next.sequence, greatest(u.touched, p_taken), true)::fairq.cursor
      when u.priority = p_next.priority then (u.priority, p_next.sequence, greatest(u.touched, p_taken), u.is_open)::fairq.cursor
      else u
    end order by u.priority desc)
  from unnest(p_cursors) u
  where u.is_open
    or u.priority <= p_next.priority
$$;
