-- A task of higher priority came for a group that already has lower ones queued: those go back in line. The lane goes back
-- to the earliest address that came free, so admission hands out the same addresses again, in order of priority.
-- The same move takes the queued tasks of a paused group out of the order (p_below = null: all of them).
-- A task that is being popped right now is locked, and keeps its address.
-- Where groups share time, finish tag and charges may differ by what corrections said since: that stays a debt or becomes credit. Otherwise
-- a group would be forgiven an hour by cancelling one task.
-- Returns the lanes as they are afterwards.
-- Locks: tasks, queued rows with "skip locked".
-- Cost: the ready set, from the clock on, and only when there is something to recall.
create function fairq._recall_queued(p_tick fairq.ticks, p_lanes fairq.lanes[], p_groups text[], p_below integer[], p_now timestamptz)
returns fairq.lanes[]
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
  v_lanes fairq.lanes[];
begin
  with queued as materialized (
    select t.ctid, t.group_key, t.priority, t.sequence, t.block, t.position, coalesce(t.charge, t.cost) as charge
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no
      and t.queue = p_tick.queue
      and t.state = 'queued'
      and (t.block, t.position) >= (p_tick.clock, p_tick.clock_position)
      and t.group_key = any(p_groups)
      and t.priority < coalesce(p_below[array_position(p_groups, t.group_key)], 2147483647)
    for update skip locked
  ),
  level as (
    select q.group_key, q.priority, min(q.sequence) as sequence, min(q.block) as block,
      min(array[q.block, q.position]) as address, count(*) as tasks, sum(q.charge) as charge
    from queued q
    group by q.group_key, q.priority
  ),
  freed as materialized (
    select l.group_key, min(l.block) as block, (min(l.address))[2] as position, sum(l.tasks)::integer as tasks, sum(l.charge) as charge,
      array_agg((l.priority, l.sequence)::fairq.cursor) as cursors
    from level l
    group by l.group_key
  )
  select (select array_agg(q.ctid) from queued q), coalesce(array_agg(
    case
      when f.group_key is null then l
      else (l.shard_no, l.last_priority, l.lane_no, l.version, greatest(f.block, f.due),
        case when f.due > f.block then fairq._lane_position(l.lane_no) else f.position end, l.weight, (f.allowance).look_at,
        l.policy is null or (f.allowance).tasks > 0, l.keyed, l.queue, l.group_key,
        array(
          select (u.priority, min(u.sequence))::fairq.cursor
          from unnest(l.cursors || f.cursors) u
          group by u.priority
          order by u.priority desc
        ), l.policy, f.gate,
        case when l.pace is distinct from null then (f.block - 1, (l.pace).credit + greatest(0, f.block - f.due), (l.pace).estimates)::fairq.pace end
      )::fairq.lanes
    end), '{}')
  into v_ctids, v_lanes
  from unnest(p_lanes) l
  left join lateral (
    select d.group_key, d.block, d.position, d.cursors, x.gate,
      -- Where the lane stands without these tasks. Each step was rounded up, by less than a unit.
      case when l.pace is distinct from null then l.finish - d.tasks - least(fairq._round() * d.charge / l.weight, 4e18)::bigint else d.block end as due,
      case when l.policy is distinct from null then fairq._allowance(l.policy, x.gate, p_now) end as allowance
    from freed d
    cross join lateral (
      -- What was charged when they were promoted is given back.
      select case when l.policy is distinct from null then fairq._charge(l.policy, l.gate, -d.tasks, p_now) else l.gate end as gate
      offset 0
    ) x
    where d.group_key = l.group_key
  ) f on true;

  if v_ctids is not null then
    perform fairq._unplace(p_tick.shard_no, v_ctids);
  end if;
  return v_lanes;
end;
$$;
comment on function fairq._recall_queued(fairq.ticks, fairq.lanes[], text[], integer[], timestamptz) is
  'Takes queued tasks of lower priority out of the order again.';
