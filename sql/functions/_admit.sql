-- Gives addresses to waiting tasks: overflow -> queued.
--
-- Candidates are the lanes just rung (p_lanes, not stored) and, when the ready set is short (p_refill), the waiting lanes from the last
-- tick's horizon on. They are filled like connected vessels: the level is the virtual time up to which all of them together have
-- p_budget tasks; a lane below it gets as many as fit, at least one. The prefix sums below give that level without a loop: for lanes in order of
-- their tags, (budget + sum(weight * tag)) / sum(weight) is smallest at the prefix that the water covers.
--
-- A lane may get fewer tasks than others already have, and then the new horizon is its next task: pops stop there until the next
-- refill. So the served order is exact whatever the level was; the level only decides how much work a pass does.
--
-- One pass, lanes -> lateral tasks -> update, and the new lane versions from the same rows: a join between these CTEs would be a
-- nested loop, because the planner expects one row of each.
--
-- p_lanes are all written again. Expired tasks get no address; their ids are returned for the caller to end.
-- Locks: tasks (overflow rows, which only the holder of the domain changes), lanes; the caller holds the domain.
-- Cost: O(p_budget) lanes and tasks; lanes_order_idx from the horizon, tasks_overflow_idx from each lane's cursor, tasks by ctid.
create function fairq._admit(
  p_tick fairq.ticks,
  p_lanes fairq.lanes[],
  p_clock bigint,
  p_refill boolean,
  p_budget integer,
  p_now timestamptz,
  out o_promoted integer,
  out o_top bigint,
  out o_middle bigint,
  out o_horizon bigint,
  out o_horizon_position bigint,
  out o_expired bigint[]
)
language plpgsql
volatile
set search_path = ''
as $$
begin
  with waiting as materialized (
    select l.ctid as replaces, l.*
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no
      and l.queue = p_tick.queue
      and l.admissible
      and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    order by l.finish, l.position
    limit 1 + case when p_refill then p_budget else 0 end
  ),
  fence as materialized (
    -- The first waiting lane that this pass leaves alone. Whatever comes after it has to wait, too.
    select w.finish, w.position, fairq._rounds(w.finish - p_clock) as tag
    from waiting w
    order by w.finish, w.position
    offset case when p_refill then p_budget else 0 end
  ),
  candidate as materialized (
    select c.*, fairq._rounds(c.finish - p_clock) as tag
    from (
      select null::tid as replaces, r.* from unnest(p_lanes) r
      union all
      select w.* from waiting w
    ) c
  ),
  prefix as (
    select (p_budget + sum(c.weight * c.tag) over by_tag) / sum(c.weight) over by_tag as level
    from candidate c
    left join fence f on true
    where c.admissible
      and (f.finish is null or (c.finish, c.position) < (f.finish, f.position))
    window by_tag as (order by c.finish, c.position)
  ),
  share as materialized (
    select c.*,
      case
        when not c.admissible or c.tag >= w.level or (c.finish, c.position) >= (f.finish, f.position) then 0
        else least(
          fairq._allowance(c.max_running, c.in_flight),
          p_budget,
          greatest(1, ceil((least(w.level, f.tag) - c.tag) * c.weight))
        )::integer
      end as quota
    from candidate c
    cross join (select min(x.level) as level from prefix x) w
    left join fence f on true
  ),
  chunk as materialized (
    select s.*, k.ctids, k.starts, coalesce(k.served, 0)::bigint as served, coalesce(k.taken, 0)::integer as taken,
      k.lowest_priority, k.expired, k.next
    from share s
    left join lateral (
      select
        array_agg(n.ctid order by n.rank) filter (where n.rank <= s.quota and not n.is_expired) as ctids,
        array_agg(n.start order by n.rank) filter (where n.rank <= s.quota and not n.is_expired) as starts,
        sum(n.step) filter (where n.rank <= s.quota) as served,
        count(*) filter (where n.rank <= s.quota and not n.is_expired) as taken,
        min(n.priority) filter (where n.rank <= s.quota and not n.is_expired) as lowest_priority,
        array_agg(n.id) filter (where n.rank <= s.quota and n.is_expired) as expired,
        (array_agg((n.priority, n.sequence)::fairq.cursor) filter (where n.rank > s.quota))[1] as next
      from (
        select t.ctid, t.id, t.priority, t.sequence, t.is_expired, t.step,
          row_number() over line as rank,
          coalesce(sum(t.step) over (line rows between unbounded preceding and 1 preceding), 0)::bigint as start
        from unnest(s.cursors) c
        cross join lateral (
          select o.ctid, o.id, o.priority, o.sequence, o.expires_at is not null and o.expires_at <= p_now as is_expired,
            case
              when o.expires_at is not null and o.expires_at <= p_now then 0
              else fairq._step(o.cost, s.weight)
            end as step
          from fairq.tasks o
          where o.shard_no = p_tick.shard_no
            and o.queue = p_tick.queue
            and o.group_key = s.group_key
            and o.state = 'overflow'
            and o.priority = c.priority
            and o.sequence >= c.sequence
          order by o.sequence
          limit s.quota + 1
        ) t
        window line as (order by t.priority desc, t.sequence)
        limit s.quota + 1
      ) n
    ) k on s.quota > 0
  ),
  moved as (
    update fairq.tasks t
    set state = 'queued', block = m.block, position = m.position, counted = m.counted
    from (
      select u.ctid, c.finish + u.start as block, c.max_running is not null as counted,
        case when u.start = 0 then c.position else c.lane_no end as position
      from chunk c
      cross join lateral unnest(c.ctids, c.starts) as u(ctid, start)
    ) m
    where t.shard_no = p_tick.shard_no
      and t.ctid = m.ctid
    returning t.block
  ),
  replaced as (
    delete from fairq.lanes l
    where l.shard_no = p_tick.shard_no
      and l.ctid = any(array(select c.replaces from chunk c where c.replaces is not null and c.quota > 0))
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, max_running, in_flight,
      last_priority, cursors, admissible)
    select c.shard_no, c.queue, c.group_key, c.version + 1, c.lane_no, c.finish + c.served,
      case when c.taken > 0 then c.lane_no else c.position end,
      c.weight, c.max_running,
      c.in_flight + case when c.max_running is null then 0 else c.taken end,
      coalesce(c.lowest_priority, c.last_priority),
      case when c.quota > 0 then fairq._advance_cursors(c.cursors, c.next) else c.cursors end,
      case
        when c.quota > 0
          then (c.next).sequence is not null and fairq._allowance(c.max_running, c.in_flight + c.taken) > 0
        else c.admissible
      end
    from chunk c
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
  ),
  promoted as (
    select count(*)::integer as tasks, max(m.block) as top, percentile_disc(0.5) within group (order by m.block) as middle
    from moved m
  )
  select p.tasks, greatest(p_tick.top, p.top), p.middle,
    (select h.finish from horizon h), (select h.position from horizon h),
    (select array_agg(e.id) from chunk c cross join lateral unnest(c.expired) e(id))
  into o_promoted, o_top, o_middle, o_horizon, o_horizon_position, o_expired
  from promoted p;
end;
$$;
comment on function fairq._admit(fairq.ticks, fairq.lanes[], bigint, boolean, integer, timestamptz) is
  'Gives block addresses to the next tasks of the waiting lanes.';
