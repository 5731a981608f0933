-- The lanes that news came for, as they are after it. From here on they live in o_lanes only, until admission writes their next versions. A lane that stays as
-- it is, such as that of a tenant who adds to a long line, is left alone unless p_all: nothing of it has to be looked at or written.
-- It settles lanes of users as well: then p_tick is of their queue and has no clock. Where a user comes in is decided later: one who was idle, or held back,
-- gets the position -1. o_reweighted: the weights so far of those that have others now, see _line.
-- Locks: lanes, rows it replaces; the caller holds the domain.
-- Cost: one step in lanes_pkey and one in groups per group that rang.
create function fairq._settle_lanes(
  p_tick fairq.ticks, p_queue fairq.queues, p_news fairq.news[], p_now timestamptz, p_all boolean, out o_tick fairq.ticks, out o_lanes fairq.lanes[],
  out o_reweighted jsonb
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_of_users boolean := p_tick.queue <> p_queue.queue;
  v_limited boolean := fairq._limits_groups(case when v_of_users then fairq._for_users(p_queue, null) else p_queue end);
  v_all record;
begin
  with known as materialized (
    select k.* from fairq._known_lanes(p_tick, p_queue, p_news, v_of_users, v_limited, p_now) k
  ),
  numbered as (
    select k.*,
      case
        when k.policy is distinct from null or (k.gate).held_until is not null then fairq._allowance(k.policy, k.gate, p_now, (k.pace).reserved)
      end as allowance,
      coalesce(k.lane_no, p_tick.lane_count + row_number() over (partition by k.lane_no is null order by k.first_sequence)) as number,
      case
        when k.is_newcomer
          -- Groups that wait for the same concurrency key are idle until it is free, and take turns.
          then row_number() over (partition by k.is_newcomer order by case when k.keyed then coalesce(k.finish, 0) else 0 end, k.first_sequence)
      end as nth_newcomer
    from known k
  ),
  placed as (
    -- A group that was idle and has used up its last turn comes at once: before the lane that is next, behind the newcomers before it. All of them have room
    -- before the next lane. In a crowd only the first few come at once; the others have their turn in the same round. Otherwise a tenant of a thousand keys
    -- would be a thousand newcomers before the next lane.
    select n.*,
      case
        when n.nth_newcomer <= 16 then least(p_tick.newcomer_position + n.nth_newcomer, ((p_tick.clock_position >> 20) + 1 << 20) - 1)
      end as newcomer_position
    from numbered n
  ),
  settled as (
    -- Nobody starts before the clock. A group that waits keeps its place, whatever it adds.
    select n.stored, n.replaces, n.configured, n.newcomer_position,
      (p_tick.shard_no, coalesce(n.last_priority, 0), coalesce(n.last_sequence, 0), n.number, coalesce(n.version, p_tick.first_version - 1),
       greatest(n.finish, p_tick.clock),
       case
         when n.comes_in then -1
         when n.newcomer_position is not null then n.newcomer_position
         when (n.finish, n.position) >= (p_tick.clock, p_tick.clock_position) and not n.was_idle and not n.is_corrected then n.position
         when n.finish > p_tick.clock then fairq._lane_position(n.number)
         else greatest(fairq._lane_position(n.number), p_tick.clock_position)
       end,
       n.weight,
       case when n.cursors <> '{}' then (n.allowance).look_at end,
       n.cursors <> '{}' and coalesce((n.allowance).tasks > 0, true),
       n.keyed, p_tick.queue, n.group_key, n.user_key, n.line, n.cursors, n.policy, n.gate, n.pace, n.inside)::fairq.lanes as lane
    from placed n
  )
  select max((s.lane).lane_no) as lane_count, max(s.newcomer_position) as newcomer_position, array_agg(s.lane) as lanes,
    array_agg(s.replaces) filter (where s.replaces is not null) as replaced,
    bool_or(s.replaces is null and fairq._counts((s.lane).policy)) as begins_to_count,
    jsonb_object_agg(fairq._line((s.lane).group_key, (s.lane).user_key, v_of_users), (s.stored).weight)
      filter (where (s.stored).weight <> (s.lane).weight) as reweighted
  into v_all
  from settled s
  where p_all
    or s.configured
    or s.lane is distinct from s.stored
    or (s.stored).version < p_tick.first_version
    or (s.lane).inside is distinct from null
    or ((s.lane).gate).uncounted > 0
    -- It may have tasks to take back, see _recall.
    or (-((s.lane).cursors[1]).priority, ((s.lane).cursors[1]).sequence) < (-(s.lane).last_priority, (s.lane).last_sequence);

  o_lanes := coalesce(v_all.lanes, '{}');
  o_reweighted := coalesce(v_all.reweighted, '{}');
  if v_all.begins_to_count then
    o_lanes := fairq._doubt_counts(p_tick, p_queue.queue, o_lanes);
  end if;
  o_tick := p_tick;
  o_tick.lane_count := greatest(p_tick.lane_count, v_all.lane_count);
  o_tick.newcomer_position := greatest(p_tick.newcomer_position, v_all.newcomer_position);
  if v_all.replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_all.replaced);
  end if;
end;
$$;

-- What is known of those that news came for, one row for each: the lane as it is stored (stored, replaces), and what the news makes of it. Where it stands in
-- the order is decided by _settle_lanes.
-- A lane from before a rebuild gives its policy, what was used of a rate or a budget, its breaker, and until when it is held, because nothing else knows these.
-- The rest of it does not count.
-- Stable and without "set search_path", so that it is inlined into the statement that asks, as the functions that it asks are.
create function fairq._known_lanes(
  p_tick fairq.ticks, p_queue fairq.queues, p_news fairq.news[], p_of_users boolean, p_limited boolean, p_now timestamptz
) returns table (
  stored fairq.lanes, replaces tid, group_key text, user_key text, line text, inside fairq.inside, version bigint, lane_no bigint, finish bigint, "position" bigint,
  weight double precision, policy fairq.policy, gate fairq.gate, pace fairq.pace, last_priority integer, last_sequence bigint, cursors fairq.cursor[],
  keyed boolean, first_sequence bigint, configured boolean, was_idle boolean, is_newcomer boolean, comes_in boolean, is_corrected boolean
)
language sql stable as $$
  select v.stored, v.replaces, n.group_key, coalesce(n.user_key, ''), coalesce(w.line, n.user_key, ''),
    case when w.has_users and l.inside is not distinct from null then (-1, 0, 0)::fairq.inside else l.inside end,
    l.version, l.lane_no, f.finish, l.position, s.weight, s.policy,
    case
      when s.policy is distinct from null or k.gate is distinct from null or n.freed <> 0 or n.hold is not null
        then fairq._settle(s.policy, k.gate, n.freed, n.failures, n.succeeded, p_now, n.used, n.hold,
          v.version is not null and fairq._counts(s.policy) and not fairq._counts(v.policy))
    end,
    c.pace, l.last_priority, l.last_sequence,
    case
      when n.heard is null or w.has_users then coalesce(l.cursors, '{}')
      when cardinality(n.heard) = 1 and coalesce(l.cursors, '{}') = '{}'
        then array[((n.heard[1]).priority, (n.heard[1]).sequence, p_tick.touched, (n.heard[1]).is_open)::fairq.cursor]
      when cardinality(n.heard) = 1 and cardinality(l.cursors) = 1 and (l.cursors[1]).priority = (n.heard[1]).priority
        then array[((l.cursors[1]).priority, least((l.cursors[1]).sequence, (n.heard[1]).sequence), (l.cursors[1]).touched,
          (l.cursors[1]).is_open)::fairq.cursor]
      else fairq._merge_cursors(l.cursors, n.heard, p_tick.touched)
    end,
    (n.keyed and w.has_users is not true) or coalesce(l.keyed, false), n.first_sequence, n.configured, i.was_idle,
    i.was_idle and coalesce(f.finish, 0) <= p_tick.clock and n.first_sequence is not null, p_of_users and l.admissible is not true, n.correction is not null
  from unnest(p_news) n
  left join lateral (
    select w as stored, w.*, w.ctid as replaces
    from fairq.lanes w
    where w.shard_no = p_tick.shard_no and w.queue = p_tick.queue and w.group_key = n.group_key and w.user_key = coalesce(n.user_key, '')
    order by w.version desc
    limit 1
  ) v on true
  left join lateral (select v.*) l on v.version >= p_tick.first_version
  cross join lateral (select coalesce(l.cursors, '{}') = '{}' as was_idle) i
  cross join lateral (
    -- What was spent in another unit is forgotten. After a rebuild a probe that was ready is in line again; one that is held is still under way.
    select case
      when v.gate is distinct from null
        then ((l.gate).in_flight, (l.gate).uncounted, (v.gate).rate_at, (v.gate).failures, (v.gate).open_until,
          case when l.version is not null or n.freed < 0 then (v.gate).probe_until end,
          case when (v.pace).unit <> p_queue.fairness then 0 else (v.gate).spent end, (v.gate).spent_until, (v.gate).held_until, (v.gate).held_by)::fairq.gate
    end as gate
  ) k
  cross join lateral fairq._limits_now(p_tick.shard_no, p_queue, n.group_key, n.user_key, p_of_users, p_limited) s
  left join lateral fairq._inside_now(p_tick, p_queue, p_of_users, n, l.inside, l.line, l.cursors <> '{}' or l.keyed or l.finish > p_tick.clock, s.settings) w
    on true
  left join lateral (
    select x.finish, x.pace
    -- "offset 0" makes this a gate before the call, not a filter behind it: queues that count pay nothing once everything that was charged before has ended.
    -- A rebuild says that in negative numbers.
    from (select where p_queue.fairness <> 'count' or (l.pace).reserved > 0 or n.charged < 0 offset 0) gate
    cross join lateral fairq._correct(l.finish, coalesce(l.pace, n.pace), p_queue.fairness, n.correction, n.charged, n.ran, s.weight, p_tick.clock,
      i.was_idle and (n.first_sequence is null or coalesce(l.finish, 0) <= p_tick.clock)) x
  ) c on true
  cross join lateral (select coalesce(c.finish, l.finish) as finish) f
$$;

-- The settings, weight and limits of a group, or of one of its users, as they are now. Inlined; "offset 0" keeps each look-up and each call a single one.
create function fairq._limits_now(p_shard_no integer, p_queue fairq.queues, p_group_key text, p_user_key text, p_of_users boolean, p_limited boolean)
returns table (settings fairq.groups, weight double precision, policy fairq.policy)
language sql stable rows 1 as $$
  select s.settings, coalesce((s.settings).weight, (o.queue).weight, p_queue.weight),
    case
      when s.settings is distinct from null or p_limited or fairq._limits_groups(o.queue)
        then fairq._policy(case when p_of_users then o.queue else p_queue end, s.settings)
    end
  from (values (1)) one
  left join lateral (
    -- What their group gives to each user.
    select fairq._for_users(p_queue, x) as queue
    from (select where p_of_users offset 0) gate
    left join lateral (
      select c.*
      from fairq.groups c
      where c.shard_no = p_shard_no and c.queue = p_queue.queue and c.group_key = p_group_key and c.user_key = ''
      offset 0
    ) x on true
    offset 0
  ) o on true
  left join lateral (
    select c as settings
    from fairq.groups c
    where c.shard_no = p_shard_no and c.queue = p_queue.queue and c.group_key = p_group_key and c.user_key = coalesce(p_user_key, '')
      and p_user_key is distinct from ''
    offset 0
  ) s on true
  offset 0
$$;

-- Whether a group has an order inside, and whose tasks its own lane is about if it has none. As long as only one user of a group has tasks, and none has
-- limits, the group is like one without users: its lane is about that user. It gets an order inside as soon as another user comes while the first has
-- something in line or ready (p_is_busy). No row for lanes of users, and where tasks name none. Inlined.
create function fairq._inside_now(
  p_tick fairq.ticks, p_queue fairq.queues, p_of_users boolean, p_news fairq.news, p_inside fairq.inside, p_line text, p_is_busy boolean,
  p_settings fairq.groups
) returns table (has_users boolean, line text)
language sql stable rows 1 as $$
  select h.has_users, case when h.has_users then coalesce(p_line, '') else coalesce((p_news).line, p_line, '') end
  from (select where p_tick.users and not p_of_users offset 0) gate
  cross join lateral (
    select p_inside is distinct from null or coalesce((p_news).lines > 1, false) or coalesce((p_news).line <> p_line and p_is_busy, false)
      or exists (
        select
        from unnest((p_news).looks || nullif(coalesce((p_news).line, p_line), '')) k(user_key)
        left join lateral (
          select c as settings
          from fairq.groups c
          where c.shard_no = p_tick.shard_no and c.queue = p_queue.queue and c.group_key = (p_news).group_key and c.user_key = k.user_key and k.user_key <> ''
          offset 0
        ) u on true
        where k.user_key is not null
          and fairq._policy(fairq._for_users(p_queue, p_settings), u.settings) is distinct from null
      ) as has_users
    offset 0
  ) h
  offset 0
$$;

-- Marks lanes whose tasks in flight may not be counted yet (see _adopt): lanes of groups and users that had none before, if settings of groups have changed
-- that this pass may have read before it heard their rings. A statement of its own, so that it sees whatever the one before it read.
-- Cost: a step in rings_notable_idx, and one for each pending transaction.
create function fairq._doubt_counts(p_tick fairq.ticks, p_queue text, p_lanes fairq.lanes[]) returns fairq.lanes[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  if exists (
      select from fairq.rings r where r.shard_no = p_tick.shard_no and r.queue = p_queue and r.configured and r.xid >= p_tick.next_xid
    )
    or exists (
      select
      from unnest(p_tick.pending) p
      cross join lateral (
        select from fairq.rings r
        where r.shard_no = p_tick.shard_no and r.queue = p_queue and r.configured and r.xid = p.xid and r.ring_id > p.ring_id
        limit 1
      ) r
    )
  then
    for v_nth in 1 .. cardinality(p_lanes) loop
      if (p_lanes[v_nth]).version < p_tick.first_version and fairq._counts((p_lanes[v_nth]).policy) then
        p_lanes[v_nth].gate.uncounted := 1;
      end if;
    end loop;
  end if;
  return p_lanes;
end;
$$;

-- The cursors of a lane after news of more of its tasks: per priority the smaller sequence, highest priority first. A level that is new to the lane does not
-- know what was taken from it before; p_touched, of the whole domain, tells what surely was not. There are eight levels at most: the last one then stands for
-- all below it, so that twenty thousand levels cost what eight do.
create function fairq._merge_cursors(p_cursors fairq.cursor[], p_heard fairq.cursor[], p_touched bigint) returns fairq.cursor[]
language sql immutable as $$
  with level as (
    select u.priority, min(u.sequence) as sequence, coalesce(max(u.touched), p_touched) as touched, coalesce(bool_or(u.is_open), false) as is_open,
      row_number() over (order by u.priority desc) as nth
    from unnest(p_cursors || p_heard) u
    -- Without what an open level covers already.
    where u.priority >= coalesce((select o.priority from unnest(p_cursors) o where o.is_open), u.priority)
    group by u.priority
  )
  select array_agg((l.priority, l.sequence, case when l.nth = 8 then (select max(m.touched) from level m where m.nth >= 8) else l.touched end,
      l.is_open or (l.nth = 8 and exists (select from level m where m.nth > 8)))::fairq.cursor order by l.priority desc)
  from level l
  where l.nth <= 8
$$;
