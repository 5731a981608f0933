-- Users of a group. A group whose tasks name users has one lane in the order of its queue, like every other group, with the same tag, weight, limits and
-- addresses. Which of its tasks come next when that lane is drawn is a fair order of its own. Users have lanes (under the queue '#users NAME') with tags in a
-- virtual time that only the group knows, and the group's addresses are given to their tasks in the order of those tags (hierarchical start-time fair
-- queueing). Tasks that name nobody belong to one more user, whose key is empty. Pops know nothing of all this; neither does a group as long as all it has in
-- line and ready is one user's (see _settle_lanes).
-- The virtual time of a group stands still while the group is not served, and begins anew when the group has nothing left.

-- The news as one row per group: whether any task came, of which user if it is only one, and what all of them used. A user for whom something in flight is
-- counted has a lane.
create function fairq._news_of_groups(p_news fairq.news[]) returns fairq.news[]
language sql stable set search_path = pg_catalog, pg_temp as $$
  select array_agg((g.group_key, coalesce((g.own).freed, 0), coalesce((g.own).failures, 0), coalesce((g.own).succeeded, false),
    coalesce((g.tasks[1]).keyed, false), coalesce((g.own).configured, false), g.first_sequence, (g.tasks[1]).heard, g.used, g.charged, g.correction,
    (select array_agg(r) from unnest(g.news) n cross join lateral unnest(n.ran) r), (g.own).hold, null, null,
    case when g.counts then 2 else cardinality(g.tasks) end, case when g.tasks is not null then coalesce((g.tasks[1]).user_key, '') end, g.looks)::fairq.news)
  from (
    select n.group_key, (array_agg(n) filter (where n.user_key is null))[1] as own, min(n.first_sequence) as first_sequence, sum(n.used) as used,
      sum(n.charged) as charged, sum(n.correction) as correction,
      array_agg(n) filter (where n.first_sequence is not null or n.keyed) as tasks, array_agg(n) filter (where n.ran is not null) as news,
      bool_or(n.user_key is not null and (n.freed <> 0 or n.failures <> 0 or n.succeeded)) as counts,
      array_agg(n.user_key) filter (where n.user_key is not null and n.configured) as looks
    from unnest(p_news) n
    group by n.group_key
  ) g
$$;

-- The lanes of users that news came for, as they are after it; and the lanes of groups, which now know whether one of their users may go on. A group that has
-- no order inside yet and needs one has the clock -1. What it has in line is its only user's: that user waits at the new clock, and whoever comes is new.
-- o_disturbed: groups whose ready tasks have to go back, because limits of a user changed, or because a user comes who is before those who are ready.
-- enable_nestloop is off: groups and news are joined by hashing, not each with each.
-- Locks: lanes, rows it replaces; the caller holds the domain.
-- Cost: a few index steps per user that rang.
create function fairq._settle_users(
  p_tick fairq.ticks, p_queue fairq.queues, p_lanes fairq.lanes[], p_news fairq.news[], p_now timestamptz,
  out o_tick fairq.ticks, out o_lanes fairq.lanes[], out o_users fairq.lanes[], out o_disturbed text[], out o_reweighted jsonb
)
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  v_tick fairq.ticks := p_tick;
begin
  v_tick.queue := fairq._users_of(p_tick.queue);
  v_tick.clock := 0;
  v_tick.clock_position := 0;
  with tenant as materialized (
    select l.group_key, (l.inside).clock < 0 as is_new, (l.inside).clock < 0 and (l.cursors <> '{}' or l.keyed) as waits, l.line, l.cursors, l.keyed, l.pace,
      -- Lanes of an earlier time may be left: the new time begins behind them.
      case
        when (l.inside).clock >= 0 then l.inside
        else (
          select (max(u.finish) + 1, 0, max(u.finish) + 1)::fairq.inside
          from (
            select 0 as finish
            union all
            select w.finish from fairq.lanes w where w.shard_no = p_tick.shard_no and w.queue = v_tick.queue and w.group_key = l.group_key
          ) u
        )
      end as inside
    from unnest(p_lanes) l
    where l.inside is distinct from null
  ),
  told_of_group as (
    select t.group_key, x.*
    from tenant t
    left join unnest(p_news) n on n.group_key = t.group_key and n.user_key is null
    cross join lateral (
      select '' as user_key, case when w.waits then nullif(t.cursors || n.heard, '{}') else n.heard end as heard,
        case when w.waits then 0 else n.first_sequence end as first_sequence, coalesce(n.keyed, false) or (w.waits and t.keyed) as keyed, n.charged, n.correction, n.ran
      from (select t.waits and t.line = '' as waits) w
      where n.first_sequence is not null
        or n.correction is not null
        -- It stepped back in the last pass, see _take_keys: that ring has no sequence.
        or n.keyed
        or w.waits
      union all
      select t.line, nullif(t.cursors, '{}'), 0, t.keyed, null, null, null where t.waits and t.line <> ''
    ) x
  ),
  line as materialized (
    select coalesce(n.group_key, b.group_key) as group_key, coalesce(n.user_key, b.user_key) as user_key, coalesce(n.freed, 0) as freed,
      coalesce(n.failures, 0) as failures, coalesce(n.succeeded, false) as succeeded, coalesce(n.keyed, false) or coalesce(b.keyed, false) as keyed,
      coalesce(n.configured, false) as configured, least(n.first_sequence, b.first_sequence) as first_sequence, n.heard || b.heard as heard,
      coalesce(n.charged, 0) + coalesce(b.charged, 0) as charged,
      case when n.correction is not null or b.correction is not null then coalesce(n.correction, 0) + coalesce(b.correction, 0) end as correction,
      n.ran || b.ran as ran
    from (select u.* from unnest(p_news) u where u.user_key is not null) n
    full join told_of_group b on b.group_key = n.group_key and b.user_key = n.user_key
  ),
  settled as materialized (
    select s.o_tick, s.o_lanes, s.o_reweighted
    from (
      -- A new user is expected to use as much as the others of the group.
      select array_agg((n.group_key, n.freed, n.failures, n.succeeded, n.keyed, n.configured, n.first_sequence, n.heard, null, n.charged, n.correction, n.ran,
        null, n.user_key, (-1, 0, (t.pace).estimates, (t.pace).unit, null)::fairq.pace, null, null, null)::fairq.news) as news
      from line n
      join tenant t on t.group_key = n.group_key
    ) x
    cross join lateral fairq._settle_lanes(v_tick, p_queue, x.news, p_now, true) s
  ),
  told as materialized (
    -- A user who waited alone goes on at the clock, behind those who are new.
    select case when w.waited then fairq._come_in(u, (t.inside).clock, null) else u end as lane,
      n.configured or s.o_reweighted ? fairq._line(u.group_key, u.user_key, true) or u.cursors <> '{}' and (u.position < 0 and u.finish < (t.inside).clock and not w.waited
        or (-(u.cursors[1]).priority, (u.cursors[1]).sequence) < (-u.last_priority, u.last_sequence))
        or (u.policy).paused_at is not null or (u.gate).open_until > p_now
        or (u.gate).in_flight + coalesce((u.gate).uncounted, 0) > (u.policy).max_running as disturbs
    from settled s
    cross join lateral unnest(s.o_lanes) u
    join line n on n.group_key = u.group_key and n.user_key = u.user_key
    join tenant t on t.group_key = u.group_key
    cross join lateral (select t.waits and u.user_key = t.line as waited) w
  )
  select (s.o_tick).lane_count, case when (select bool_or(t.waits) from tenant t) then (select array_agg(t.lane) from told t) else s.o_lanes end,
    array(select distinct (t.lane).group_key from told t where t.disturbs),
    (
      select array_agg(case when n.group_key is null then l else fairq._with_users(l, n.inside, n.goes_on or (not n.is_new and l.cursors <> '{}'), p_now) end)
      from unnest(p_lanes) l
      left join (
        select i.group_key, i.inside, i.is_new, coalesce(bool_or((u.lane).admissible), false) as goes_on
        from tenant i
        left join told u on (u.lane).group_key = i.group_key
        group by i.group_key, i.inside, i.is_new
      ) n on n.group_key = l.group_key
    ), s.o_reweighted
  into p_tick.lane_count, o_users, o_disturbed, o_lanes, o_reweighted
  from settled s;
  o_tick := p_tick;
  o_lanes := coalesce(o_lanes, '{}');
end;
$$;

-- The lane of a group that has users. Its cursor stands for all of theirs.
create function fairq._with_users(p_lane fairq.lanes, p_inside fairq.inside, p_goes_on boolean, p_now timestamptz) returns fairq.lanes
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_allowance fairq.allowance;
begin
  if p_lane.policy is distinct from null or (p_lane.gate).held_until is not null then
    v_allowance := fairq._allowance(p_lane.policy, p_lane.gate, p_now, (p_lane.pace).reserved);
  end if;
  p_lane.inside := p_inside;
  p_lane.line := '';
  p_lane.keyed := false;
  p_lane.cursors := case when p_goes_on then array[(0, 0, 0, false)::fairq.cursor] else '{}' end;
  p_lane.look_at := case when p_goes_on then v_allowance.look_at end;
  p_lane.admissible := p_goes_on and coalesce(v_allowance.tasks > 0, true);
  return p_lane;
end;
$$;

-- Where a user comes in who was idle or held back: at the clock of the group, and if the user's last turn is used up, before everybody there. In a crowd only
-- the first few do; see _settle_lanes. A user who waits, or has used more than that, is not moved back.
-- What somebody has left of an earlier time is no credit.
create function fairq._come_in(p_user fairq.lanes, p_clock bigint, p_nth bigint) returns fairq.lanes
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_user.finish < p_clock and (p_user.pace).credit > 0 then p_user.pace.credit := 0; end if;
  p_user.position := case when p_user.finish < p_clock and p_nth <= 16 then 0 else fairq._lane_position(p_user.lane_no) end;
  p_user.finish := greatest(p_user.finish, p_clock);
  return p_user;
end;
$$;

-- How many tasks each user of the groups drawn may have, as in _share_out, with what the group may have for a budget. Candidates are the lanes just rung
-- (p_users, not stored) and the first ones that wait.
-- Cost: O(quota) of each group, lanes_users_idx from its clock.
create function fairq._share_inside(p_tick fairq.ticks, p_shares fairq.share[], p_users fairq.lanes[]) returns fairq.share[]
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  v_now timestamptz := fairq._now();
begin
  return (
    with tenant as materialized (
      select (s.lane).group_key, ((s.lane).inside).clock, ((s.lane).inside).position, s.quota,
        -- How many of its tasks this pop takes now, at most.
        case
          when (s.lane).finish < s.reach
            then least(s.quota, ceil(fairq._rounds(s.reach - (s.lane).finish) * (s.lane).weight / coalesce((((s.lane).pace).estimates[1]).used, 1)))
          else 0
        end as near
      from unnest(p_shares) s
    ),
    candidate as materialized (
      select t.group_key, t.clock, t.quota, t.near, c.lane, c.replaces, fairq._rounds((c.lane).finish - t.clock) as tag,
        (c.lane).weight / coalesce((((c.lane).pace).estimates[1]).used, 1) as width
      from tenant t
      join (
        select x.group_key, case when x.position < 0 then fairq._come_in(x.lane, x.clock, x.nth) else x.lane end as lane, null::tid as replaces
        from (
          select u as lane, u.group_key, u.position, i.clock,
            row_number() over (partition by u.group_key, u.position < 0 and u.finish < i.clock order by u.lane_no) as nth
          from unnest(p_users) u
          join tenant i on i.group_key = u.group_key
        ) x
      ) c on c.group_key = t.group_key
      union all
      select t.group_key, t.clock, t.quota, t.near, w.lane, w.replaces, fairq._rounds((w.lane).finish - t.clock),
        (w.lane).weight / coalesce((((w.lane).pace).estimates[1]).used, 1)
      from tenant t
      cross join lateral (
        select l as lane, l.ctid as replaces
        from fairq.lanes l
        where l.shard_no = p_tick.shard_no and l.queue = fairq._users_of(p_tick.queue) and l.queue like '#users %' and l.group_key = t.group_key and l.admissible
          and (l.finish, l.position) >= (t.clock, t.position)
        order by l.finish, l.position
        limit case when t.quota > 0 then t.quota + 1 else 0 end
      ) w
    ),
    leveled as (
      select c.*, row_number() over by_tag as nth, (c.quota + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as level,
        (c.near + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as reach
      from candidate c
      window by_tag as (partition by c.group_key order by (c.lane).admissible desc, (c.lane).finish, (c.lane).position, (c.lane).lane_no)
    ),
    water as (
      select l.*, min(l.level) filter (where (l.lane).admissible and l.nth <= l.quota) over tenant as water,
        min(l.reach) filter (where (l.lane).admissible and l.nth <= l.near) over tenant as near_water
      from leveled l
      window tenant as (partition by l.group_key)
    )
    select array_agg((w.lane, w.replaces,
      case
        when (w.lane).admissible and w.nth <= w.quota and w.tag < w.water
          then least(
            case when (w.lane).policy is distinct from null then (fairq._allowance((w.lane).policy, (w.lane).gate, v_now)).tasks end,
            w.quota,
            greatest(1, ceil((w.water - w.tag) * w.width))
          )::integer
        else 0
      end,
      w.clock + coalesce(least(4e18, ceil(w.near_water * fairq._round())), 0)::bigint, 9223372036854775807)::fairq.share order by w.group_key, w.nth)
    from water w
  );
end;
$$;

-- Where a lane that was drawn goes on or waits: its address, and its number, because newcomers may share an address. Null: it does not. Inlined.
create function fairq._goes_on_at(p_drawn fairq.drawn, p_now timestamptz) returns bigint[]
language sql immutable as $$
  select case
    when (p_drawn.next).sequence is not null and p_drawn.yields is not true and ((p_drawn.lane).policy is not distinct from null
      or (fairq._allowance((p_drawn.lane).policy, fairq._charge((p_drawn.lane).policy, (p_drawn.lane).gate, coalesce(cardinality(p_drawn.tasks), 0), p_now),
        p_now)).tasks > 0)
      then array[(p_drawn.lane).finish + p_drawn.served,
        case when cardinality(p_drawn.tasks) > 0 then fairq._lane_position((p_drawn.lane).lane_no) else (p_drawn.lane).position end, (p_drawn.lane).lane_no]
    when p_drawn.quota = 0 and (p_drawn.lane).admissible then array[(p_drawn.lane).finish, (p_drawn.lane).position, (p_drawn.lane).lane_no]
  end
$$;

-- Merges what the users of each group drawn gave: in the order of their tags, up to the first user who might give more, and as many as the group may have. So
-- the order inside is exact whatever each user was allowed. The tasks get the group's addresses, each a step further by cost and the group's weight, or less
-- while the group has credit.
create function fairq._merge_users(p_shares fairq.share[], p_drawn fairq.drawn[], p_now timestamptz) returns fairq.drawn[]
language plpgsql immutable set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
begin
  return (
    with tenant as materialized (
      select s.nth, s.lane, s.replaces, s.quota, s.room, (s.lane).group_key, (s.lane).weight, (s.lane).finish, (s.lane).position,
        coalesce(((s.lane).pace).credit, 0) as credit, fairq._lane_position((s.lane).lane_no) as usual_position, fairq._counts((s.lane).policy) as counts
      from unnest(p_shares) with ordinality as s(lane, replaces, quota, reach, room, nth)
    ),
    line as materialized (
      select t.nth, (d.lane).lane_no, d.tasks, d.expired, d.timed and d.tasks is not null as timed, fairq._goes_on_at(d, p_now) as next
      from unnest(p_drawn) d
      join tenant t on t.group_key = (d.lane).group_key
    ),
    fence as materialized (
      -- The first user who might give more.
      select n.nth, n.next[1] as block, n.next[2] as position, n.next[3] as lane_no, n.timed
      from (select l.nth, min(l.next) as next, bool_or(l.timed) as timed from line l group by l.nth) n
    ),
    given as (
      select l.nth, t.finish, t.position as first_position, t.usual_position, t.credit, t.counts, t.quota, t.room, g.*, k.step,
        (sum(k.step::double precision) over in_order)::bigint as charged, row_number() over in_order as place,
        (sum(k.step::double precision) over in_order)::bigint - k.step
          - fairq._spent(t.credit, (sum(k.step::double precision) over in_order)::bigint - k.step, row_number() over in_order - 1) as start
      from line l
      join fence f on f.nth = l.nth
      join tenant t on t.nth = l.nth
      cross join lateral unnest(l.tasks) g
      cross join lateral (select fairq._step(g.cost, t.weight) as step) k
      where f.block is null
        or (g.block, g.position, l.lane_no) < (f.block, f.position, f.lane_no)
      window in_order as (partition by l.nth order by g.block, g.position, l.lane_no rows unbounded preceding)
    ),
    taken as (
      select g.nth, max(g.charged - fairq._spent(g.credit, g.charged, g.place)) as served,
        array_agg((g.id, g.finish + g.start, case when g.start = 0 then g.first_position else g.usual_position end, g.charge, g.counts, g.keyed, g.priority,
          g.sequence, g.group_key, g.attempt, g.expires_at, null, g.long, g.user_key, g.block, g.counted, g.cost)::fairq.placed) as tasks
      from given g
      where g.place <= g.quota
        and g.finish + g.charged - g.step < g.room
      group by g.nth
    )
    select array_agg((t.lane, t.replaces, t.quota, k.tasks, e.expired, null, coalesce(k.served, 0), null, null, false,
      coalesce(f.timed, false) or fairq._runs_with_time((t.lane).policy, (t.lane).gate))::fairq.drawn)
    from tenant t
    left join fence f on f.nth = t.nth
    left join taken k on k.nth = t.nth
    left join (
      select l.nth, array_agg(x.id) as expired from line l cross join lateral unnest(l.expired) x(id) group by l.nth
    ) e on e.nth = t.nth
  );
end;
$$;

-- Writes the lanes of users once it is known which of their tasks the groups have taken. The others go back in line; one for which a place of its key, or a
-- slot, was taken keeps it until its turn. The groups learn where their users' order has come.
-- Locks: lanes; parked; the caller holds the domain and, where tasks have keys, #keys.
create function fairq._write_users(
  p_tick fairq.ticks, p_drawn fairq.drawn[], p_users fairq.drawn[], p_now timestamptz, out o_tick fairq.ticks, out o_drawn fairq.drawn[]
)
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  v_users fairq.drawn[] := p_users;
  v_granted fairq.placed[];
  v_written fairq.ticks;
begin
  -- Nearly always the groups took all that their users gave.
  if (select sum(cardinality(u.tasks)) from unnest(p_users) u)
    <> (select coalesce(sum(cardinality(d.tasks)), 0) from unnest(p_drawn) d where (d.lane).inside is distinct from null)
  then
    with line as materialized (
      select d, coalesce(cardinality(d.tasks), 0) as given, coalesce(k.kept, 0)::integer as kept
      from unnest(p_users) d
      left join (
        select t.group_key, t.user_key, count(*) as kept
        from unnest(p_drawn) o
        cross join lateral unnest(o.tasks) t
        where (o.lane).inside is distinct from null
        group by t.group_key, t.user_key
      ) k on k.group_key = (d.lane).group_key and k.user_key = (d.lane).user_key
    )
    select array_agg(case
        when l.kept = l.given then l.d
        else ((l.d).lane, (l.d).replaces, (l.d).quota, (l.d).tasks[1:l.kept], (l.d).expired,
          coalesce((
            select (t.priority, t.sequence, null, false)::fairq.cursor
            from unnest((l.d).tasks[l.kept + 1:]) t
            where not t.keyed and t.long is not true
            order by t.block
            limit 1
          ), (l.d).next),
          ((l.d).tasks[l.kept + 1]).block - ((l.d).lane).finish, (l.d).touched, (l.d).keyed, false, (l.d).timed)::fairq.drawn
      end),
      (select array_agg(t) from line b cross join lateral unnest((b.d).tasks[b.kept + 1:]) t where b.kept < b.given and (t.keyed or t.long))
    into v_users, v_granted
    from line l;
  end if;
  if v_granted is not null then
    insert into fairq.parked (shard_no, id, queue, group_key, user_key, concurrency_key, priority, sequence, granted)
    select p_tick.shard_no, g.id, p_tick.queue, g.group_key, g.user_key, case when g.long then '' else t.concurrency_key end, g.priority,
      g.sequence, true
    from unnest(v_granted) g
    cross join lateral fairq._body(p_tick.shard_no, g.id) t;
    insert into fairq.rings (shard_no, queue, group_key, user_key, sequence, keyed)
    select p_tick.shard_no, p_tick.queue, g.group_key, nullif(g.user_key, ''), min(g.sequence), true
    from unnest(v_granted) g
    group by g.group_key, g.user_key;
  end if;
  v_written := fairq._write_lanes(p_tick, v_users, p_now);
  o_tick := p_tick;
  o_tick.touched := v_written.touched;
  o_tick.keyed := v_written.keyed;

  o_drawn := array(
    select case
      when (d.lane).inside is not distinct from null then d
      else (fairq._with_users(d.lane, (coalesce(i.next[1], i.top), coalesce(i.next[2], 0), i.top)::fairq.inside, i.next is not null or d.quota > 0, p_now),
        d.replaces, d.quota, d.tasks, d.expired, case when i.next is not null then (0, 0, 0, false)::fairq.cursor end, d.served, null, null, false,
        d.timed)::fairq.drawn
    end
    from unnest(p_drawn) d
    left join (
      select (u.lane).group_key, min((u.lane).finish) as start, max((u.lane).finish + u.served) as finish, min(fairq._goes_on_at(u, p_now)) as next
      from unnest(v_users) u
      group by (u.lane).group_key
    ) w on w.group_key = (d.lane).group_key
    -- The first user who may go on. Among those drawn one waits, or there is nobody else. In a group that was not drawn it is whoever stands first.
    left join lateral (
      select array[o.finish, o.position] as next
      from (select where d.quota = 0 and (d.lane).inside is distinct from null offset 0) gate
      cross join lateral (
        select l.finish, l.position
        from fairq.lanes l
        where l.shard_no = p_tick.shard_no and l.queue = fairq._users_of(p_tick.queue) and l.queue like '#users %' and l.group_key = (d.lane).group_key
          and l.admissible
          and l.finish >= least(((d.lane).inside).clock, w.start)
        order by l.finish, l.position
        limit 1
      ) o
    ) n on true
    cross join lateral (
      select greatest(((d.lane).inside).top, ((d.lane).inside).clock, w.finish) as top, case when d.quota = 0 then n.next else w.next end as next
    ) i
  );
end;
$$;

-- After ready tasks of groups with users were taken out of the order: the users go back to the earliest address that each of them had there, and so does the
-- order inside. What the tasks were charged is given back, as in _recall_groups.
-- Locks: lanes, rows it replaces. Cost: a few index steps per user that had tasks ready.
create function fairq._recall_users(
  p_tick fairq.ticks, p_queue fairq.queues, p_lanes fairq.lanes[], p_users fairq.lanes[], p_back fairq.placed[], p_reweighted jsonb, p_now timestamptz,
  out o_tick fairq.ticks, out o_lanes fairq.lanes[], out o_users fairq.lanes[]
)
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  v_others fairq.news[] := array(
    select (b.group_key, 0, 0, false, false, false, null, null, null, null, null, null, null, b.user_key, null, null, null, null)::fairq.news
    from unnest(p_back) b
    join unnest(p_lanes) l on l.group_key = b.group_key and l.inside is distinct from null
    left join unnest(p_users) u on u.group_key = b.group_key and u.user_key = b.user_key
    where u.group_key is null
    group by b.group_key, b.user_key
  );
  v_settled record;
begin
  o_tick := p_tick;
  if v_others <> '{}' then
    v_settled := fairq._settle_users(p_tick, p_queue, p_lanes, v_others, p_now);
    o_tick := v_settled.o_tick;
    p_users := p_users || v_settled.o_users;
    p_reweighted := p_reweighted || v_settled.o_reweighted;
  end if;
  with back as materialized (
    -- Tasks that were ready before there was an order inside were charged nothing there.
    select b.group_key, b.user_key, b.priority, b.sequence, b.user_counted, case when b.user_block is not null then b.charge end as charge, b.user_block,
      coalesce(b.user_block, (l.inside).clock) as block
    from unnest(p_back) b
    join unnest(p_lanes) l on l.group_key = b.group_key and l.inside is distinct from null
  ),
  freed as materialized (
    select b.group_key, b.user_key, min(b.block) as block, count(b.user_block)::integer as tasks, (count(*) filter (where b.user_counted))::integer as counted,
      coalesce(sum(b.charge), 0) as charge, array_agg((b.priority, b.sequence, null, false)::fairq.cursor) as cursors
    from back b
    group by b.group_key, b.user_key
  )
  select array_agg(
    case
      when f.group_key is null then u
      else fairq._take_back(u, f.block, fairq._lane_position(u.lane_no), f.tasks, f.counted, f.charge, f.charge, f.cursors, p_tick.touched,
        coalesce((p_reweighted ->> fairq._line(u.group_key, u.user_key, true))::double precision, u.weight), p_now)
    end),
    (
      -- Somebody who came back meanwhile may stand before them.
      select array_agg(case
        when b.group_key is null then l
        when b.block > (l.inside).clock then fairq._with_users(l, l.inside, true, p_now)
        else fairq._with_users(l, (b.block, 0, (l.inside).top)::fairq.inside, true, p_now)
      end)
      from unnest(p_lanes) l
      left join (select f.group_key, min(f.block) as block from freed f group by f.group_key) b on b.group_key = l.group_key
    )
  into o_users, o_lanes
  from unnest(p_users) u
  left join freed f on f.group_key = u.group_key and f.user_key = u.user_key;
end;
$$;
