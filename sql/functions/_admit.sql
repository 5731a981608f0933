-- Gives addresses to waiting tasks: overflow -> queued.
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
-- One pass, lanes -> lateral tasks, and the new lane versions from the same rows: a join between these CTEs would be a nested loop, because
-- the planner expects one row of each. The tasks found are then updated by ctid, in _place: a join with fairq.tasks here could become a walk
-- through all tasks of the shard.
--
-- How many tasks a lane with limits may have, says _allowance, what they use up, _charge. In a lane whose tasks have concurrency keys,
-- _take_keys says which are next, and passes over those whose key is taken.
-- Which lanes these are was heard before; tasks are read now, and may have committed since. So a lane not known for keys ends before the first task that
-- has one, as if its share were used up: that task's ring is still to be heard. Placed without its key it would give back what it never took.
-- p_lanes are all written again. Expired tasks get no address; their ctids are returned for the caller to end.
-- Locks: tasks (overflow rows, which only the holder of the domain changes), lanes; the caller holds the domain.
-- Cost: O(p_budget) lanes and tasks; lanes_order_idx from the horizon, tasks_overflow_idx from each lane's cursor, tasks by ctid.
create function fairq._admit(
  p_tick fairq.ticks,
  p_lanes fairq.lanes[],
  p_refill boolean,
  p_budget integer,
  p_now timestamptz,
  out o_promoted integer,
  out o_top bigint,
  out o_middle bigint,
  out o_middle_position bigint,
  out o_horizon bigint,
  out o_horizon_position bigint,
  out o_expired tid[]
)
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
  v_blocks bigint[];
  v_positions bigint[];
  v_counted boolean[];
  v_charges double precision[];
  v_replaced tid[];
begin
  with waiting as (
    select l.ctid as replaces, l.lane_no, l.version, l.finish, l.position, l.weight, l.last_priority, l.look_at,
      l.admissible, l.keyed, l.group_key, l.cursors, l.policy, l.gate, l.pace
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no
      and l.queue = p_tick.queue
      and l.admissible
      and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    order by l.finish, l.position
    limit 1 + case when p_refill then p_budget else 0 end
  ),
  candidate as materialized (
    select c.*, fairq._rounds(c.finish - p_tick.clock) as tag,
      c.weight / coalesce(((c.pace).estimates[1]).seconds, 1) as width,
      row_number() over (order by c.admissible desc, c.finish, c.position) as nth
    from (
      select null::tid as replaces, r.lane_no, r.version, r.finish, r.position, r.weight, r.last_priority, r.look_at,
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
    select min(x.level) as level, least(min(x.level), min(x.fence)) as fenced, min(x.fence_nth) as fence_nth
    from (
      select (p_budget + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as level, f.tag as fence, f.nth as fence_nth
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
      end as quota
    from candidate c
    left join water w on true
  ),
  chunk as materialized (
    select s.replaces, s.lane_no, s.version, s.finish, s.position, s.weight, s.last_priority, s.look_at, s.admissible,
      s.keyed, s.group_key, s.cursors, s.quota, s.policy,
      case when s.policy is distinct from null then fairq._charge(s.policy, s.gate, coalesce(k.taken, 0)::integer, p_now) else s.gate end as gate,
      fairq._last_block(s.pace, s.finish + k.last_start) as pace,
      k.ctids, k.starts, k.charges, coalesce(k.served, 0)::bigint as served, coalesce(k.taken, 0)::integer as taken, k.lowest_priority, k.expired, k.next
    from share s
    left join lateral (
      select
        array_agg(n.ctid) filter (where n.is_taken) as ctids,
        array_agg(n.start) filter (where n.is_taken) as starts,
        array_agg(n.charge) filter (where n.is_taken and n.charge is not null) as charges,
        max(n.start) filter (where n.is_taken) as last_start,
        sum(n.step) filter (where not n.is_next) as served,
        count(*) filter (where n.is_taken) as taken,
        min(n.priority) filter (where n.is_taken) as lowest_priority,
        array_agg(n.ctid) filter (where n.is_expired and not n.is_next) as expired,
        (array_agg((n.priority, n.sequence)::fairq.cursor) filter (where n.is_next))[1] as next
      from (
        select t.ctid, t.priority, t.sequence, t.is_expired, t.charge, t.step,
          row_number() over line > s.quota or bool_or(t.has_key) over line as is_next,
          not t.is_expired and row_number() over line <= s.quota and not bool_or(t.has_key) over line as is_taken,
          coalesce(sum(t.step) over (line rows between unbounded preceding and 1 preceding), 0)::bigint as start
        from (
          select y.*
          from fairq._next_tasks(p_tick.shard_no, p_tick.queue, s.group_key, s.cursors, s.weight, s.pace, s.quota + 1, p_now) y
          where not s.keyed
          union all
          select y.*, false
          from fairq._take_keys(p_tick, s.group_key, s.cursors, s.weight, s.pace, s.quota, p_now) y
          where s.keyed
        ) t
        window line as (order by t.priority desc, t.sequence)
        order by t.priority desc, t.sequence
        limit s.quota + 1
      ) n
    ) k on s.quota > 0
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, keyed, policy, gate, pace, last_priority,
      cursors, look_at, admissible)
    select p_tick.shard_no, p_tick.queue, c.group_key, c.version + 1, c.lane_no, c.finish + c.served,
      case when c.taken > 0 then fairq._lane_position(c.lane_no) else c.position end,
      c.weight, c.keyed, c.policy, c.gate, c.pace,
      coalesce(c.lowest_priority, c.last_priority),
      -- Higher priorities are used up, the level of the next task begins with it, lower ones are untouched. Written out here:
      -- a function with a subquery would cost an executor start for every lane.
      case
        when c.quota = 0 then c.cursors
        when (c.next).sequence is null then '{}'
        when cardinality(c.cursors) = 1 then array[c.next]
        else array[c.next] || array(
          select u from unnest(c.cursors) u where u.priority < (c.next).priority order by u.priority desc
        )
      end,
      case when c.quota = 0 then c.look_at when (c.next).sequence is not null then (a.allowance).look_at end,
      case when c.quota = 0 then c.admissible else (c.next).sequence is not null and (c.policy is null or (a.allowance).tasks > 0) end
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
  select p.ctids, p.blocks, p.positions, p.counted, p.charges, (select greatest(p_tick.top, max(c.finish + c.served)) from chunk c),
    (select h.finish from horizon h), (select h.position from horizon h),
    (select array_agg(e.ctid) from chunk c cross join lateral unnest(c.expired) e(ctid)),
    (select array_agg(c.replaces) from chunk c where c.replaces is not null and c.quota > 0)
  into v_ctids, v_blocks, v_positions, v_counted, v_charges, o_top, o_horizon, o_horizon_position, o_expired, v_replaced
  from (
    select array_agg(m.ctid) as ctids, array_agg(m.block) as blocks, array_agg(m.position) as positions, array_agg(m.counted) as counted,
      array_agg(m.charge) as charges
    from (
      select u.ctid, c.finish + u.start as block, fairq._counts(c.policy) as counted, u.charge,
        case when u.start = 0 then c.position else fairq._lane_position(c.lane_no) end as position
      from chunk c
      cross join lateral unnest(c.ctids, c.starts, c.charges) as u(ctid, start, charge)
    ) m
  ) p;

  select m.block, m.position into o_middle, o_middle_position
  from unnest(v_blocks, v_positions) as m(block, position)
  order by m.block, m.position
  offset cardinality(v_blocks) / 2
  limit 1;

  o_top := coalesce(o_top, p_tick.top);
  o_promoted := case when v_ctids is null then 0 else fairq._place(p_tick.shard_no, v_ctids, v_blocks, v_positions, v_counted, v_charges) end;
  if v_replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_replaced);
  end if;
end;
$$;
comment on function fairq._admit(fairq.ticks, fairq.lanes[], boolean, integer, timestamptz) is
  'Gives block addresses to the next tasks of the waiting lanes.';
