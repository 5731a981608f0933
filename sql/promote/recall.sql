-- Takes ready tasks of lanes out of the order again when what made them ready no longer holds: a task that is before them in their group came, or came back;
-- the group was paused or held, its breaker opened, its budget was used up, its cap or another limit changed; or one of them is to be cancelled or has expired.
-- The lane goes back to the earliest address that came free, so admission hands out the same addresses again, in order, and what the tasks were charged is
-- given back. A task that is being popped right now is locked and keeps its address; its group is looked at again in case that pop rolls back.
-- Where groups share what tasks use, finish tag and charges may differ by what corrections said since. The difference stays a debt or becomes credit: otherwise
-- a group would be forgiven an hour by cancelling one task.
-- A group that has users goes back with all of them: who is next among them is decided anew.
-- Returns the lanes as they are afterwards, and those of users.
-- Locks: ready, "skip locked".
-- Cost: the ready set, from the clock on, and only when there is something to recall.
create function fairq._recall(
  p_tick fairq.ticks, p_queue fairq.queues, p_lanes fairq.lanes[], p_news fairq.news[], p_cancelled bigint[], p_now timestamptz, p_users fairq.lanes[],
  p_disturbed text[], p_users_configured text[], p_reweighted jsonb, p_users_reweighted jsonb, out o_tick fairq.ticks, out o_lanes fairq.lanes[], out o_users fairq.lanes[]
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_configured text[] := array(select n.group_key from unnest(p_news) n where n.configured);
  -- A new weight may be read before its ring is heard.
  v_whole text[] := v_configured || p_disturbed || array(select jsonb_object_keys(p_reweighted));
  v_groups text[];
  v_before fairq.cursor[];
  v_recalled record;
begin
  o_tick := p_tick;
  o_users := p_users;
  if p_cancelled is not null then
    v_whole := v_whole || array(
      select distinct t.group_key
      from unnest(p_cancelled) i(id)
      cross join lateral (select r.group_key from fairq.ready r where r.shard_no = p_tick.shard_no and r.id = i.id offset 0) t
    );
  end if;
  select array_agg(l.group_key), array_agg(case when not w.is_whole then l.cursors[1] end) into v_groups, v_before
  from unnest(p_lanes) l
  cross join lateral (
    select l.group_key = any(v_whole)
      or coalesce((l.policy).paused_at is not null or (l.gate).open_until > p_now or (l.gate).held_until > p_now
        or (l.gate).in_flight + coalesce((l.gate).uncounted, 0) > (l.policy).max_running, false)
        -- More was used than expected: the budget may not be enough for what is ready.
        or ((l.policy).budget is not null and fairq._budget_left(l.policy, l.gate, (l.pace).reserved, p_now) < 0
          and exists (select from unnest(p_news) n where n.group_key = l.group_key and n.correction > 0)) as is_whole
  ) w
  where l.finish > p_tick.clock
    and (w.is_whole or (l.inside is not distinct from null and (-(l.cursors[1]).priority, (l.cursors[1]).sequence) < (-l.last_priority, l.last_sequence)));
  if v_groups is not null then
    v_recalled := fairq._recall_groups(p_tick, p_lanes, v_groups, v_before, p_reweighted, p_now);
    p_lanes := v_recalled.o_lanes;
    if v_recalled.o_back is not null then
      v_recalled := fairq._recall_users(p_tick, p_queue, p_lanes, p_users, v_recalled.o_back, p_users_reweighted, p_now);
      o_tick := v_recalled.o_tick;
      p_lanes := v_recalled.o_lanes;
      o_users := v_recalled.o_users;
    end if;
  end if;
  if exists (select from unnest(p_lanes) l where (l.gate).uncounted > 0 or (l.group_key = any(v_configured) and fairq._counts(l.policy))) then
    p_lanes := fairq._adopt(p_tick, p_lanes, v_configured, p_now);
  end if;
  if exists (select from unnest(o_users) u where (u.gate).uncounted > 0 or fairq._line(u.group_key, u.user_key, true) = any(p_users_configured)) then
    o_users := fairq._adopt(p_tick, o_users, p_users_configured, p_now, true);
  end if;
  o_lanes := p_lanes;
end;
$$;

-- Rings for groups that have ready tasks whose deadline has passed, as if these were to be cancelled: promotion takes all that such a group has ready out of
-- the order again, and ends what expired when it meets it in line. If they ended where they are, the group would pay with its turns for tasks that never ran.
-- Returns whether anybody rings. Cost: the ready set.
create function fairq._ring_late(p_tick fairq.ticks, p_now timestamptz) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select p_tick.shard_no, p_tick.queue, r.group_key, min(r.id)
  from fairq.ready r
  where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
    and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
    and r.expires_at <= p_now
  group by r.group_key;
  return found;
end;
$$;

-- Takes ready tasks of groups out of the order again.
create function fairq._recall_groups(
  p_tick fairq.ticks, p_lanes fairq.lanes[], p_groups text[], p_before fairq.cursor[], p_reweighted jsonb, p_now timestamptz, out o_lanes fairq.lanes[], out o_back fairq.placed[]
)
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  -- Per group the place behind which its tasks are taken; null: all of them. An object, because with an array each ready task would be compared with each
  -- group.
  v_before jsonb := (
    select jsonb_object_agg(g.group_key, case when g.priority is not null then jsonb_build_array(-g.priority, g.sequence) end)
    from unnest(p_groups, p_before) g(group_key, priority, sequence, touched, is_open)
  );
  v_ctids tid[];
  v_keyed bigint[];
begin
  with back as materialized (
    select r.ctid, r.id, r.keyed_at, r.group_key, t.priority, t.sequence, r.block, r.position, r.counted, r.charge as reserved, coalesce(r.charge, t.cost) as charge,
      r.user_key, r.user_block, r.user_counted
    from fairq.ready r
    cross join lateral fairq._body(p_tick.shard_no, r.id) t
    where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
      and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
      and v_before ? r.group_key
      and (-t.priority, t.sequence)
        > (coalesce((v_before -> r.group_key ->> 0)::integer, -2147483648), coalesce((v_before -> r.group_key ->> 1)::bigint, 0))
    for update of r skip locked
  ),
  freed as materialized (
    select b.group_key, min(array[b.block, b.position]) as address, count(*)::integer as tasks, (count(*) filter (where b.counted))::integer as counted,
      sum(b.charge) as charge, coalesce(sum(b.reserved), 0) as reserved, array_agg((b.priority, b.sequence, null, false)::fairq.cursor) as cursors
    from back b
    group by b.group_key
  )
  select (select array_agg(b.ctid) from back b),
    (select array_agg((b.id, b.block, b.position, b.charge, b.counted, null, b.priority, b.sequence, b.group_key, null, null, null, null, b.user_key, b.user_block,
      b.user_counted, null)::fairq.placed) from back b where p_tick.users),
    (select array_agg(b.id) filter (where b.keyed_at is not null) from back b), coalesce(array_agg(
    case
      when f.group_key is null then l
      else fairq._take_back(l, f.address[1], f.address[2], f.tasks, f.counted, f.charge, f.reserved, f.cursors, p_tick.touched,
        coalesce((p_reweighted ->> l.group_key)::double precision, l.weight), p_now)
    end), '{}')
  into v_ctids, o_back, v_keyed, o_lanes
  from unnest(p_lanes) l
  left join freed f on f.group_key = l.group_key;

  if v_ctids is not null then
    perform fairq._remove(p_tick.shard_no, 'ready', v_ctids);
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select p_tick.shard_no, '#keys', t.concurrency_key, count(*)
    from unnest(v_keyed) k(id)
    cross join lateral fairq._body(p_tick.shard_no, k.id) t
    group by t.concurrency_key;
  end if;
  insert into fairq.rings (shard_no, queue, group_key, configured)
  select distinct p_tick.shard_no, p_tick.queue, r.group_key, true
  from fairq.ready r
  where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
    and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
    and jsonb_typeof(v_before -> r.group_key) = 'null';
end;
$$;

-- A lane without tasks of its that were ready. It goes back to the earliest address of theirs and gets back what they were charged. p_counted of them had a
-- place. None started, so none is charged to a rate.
-- Pops may have gone past some of these tasks, because another session had them locked at that moment, and may have taken what lay behind. Those turns are not
-- given out again, or the group would have them twice. p_weight is the one by which the tasks were charged.
create function fairq._take_back(
  p_lane fairq.lanes, p_block bigint, p_position bigint, p_tasks integer, p_counted integer, p_charge double precision, p_reserved double precision,
  p_cursors fairq.cursor[], p_touched bigint, p_weight double precision, p_now timestamptz
) returns fairq.lanes
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  -- Where the lane stands without these tasks. Each step was rounded up, by less than a unit.
  v_due constant bigint := p_lane.finish - p_tasks - least(fairq._round() * p_charge / p_weight, 4e18)::bigint;
  v_allowance fairq.allowance;
begin
  if p_lane.pace is distinct from null then
    p_lane.pace.last_block := p_block - 1;
    p_lane.pace.credit := (p_lane.pace).credit + greatest(0, p_block - v_due);
    p_lane.pace.reserved := (p_lane.pace).reserved - p_reserved;
  end if;
  p_lane.finish := greatest(p_block, v_due);
  p_lane.position := case when v_due > p_block then fairq._lane_position(p_lane.lane_no) else p_position end;
  if p_lane.gate is distinct from null then
    p_lane.gate.in_flight := coalesce((p_lane.gate).in_flight, 0) - p_counted;
    p_lane.gate.rate_at := (p_lane.gate).rate_at - p_tasks * coalesce((p_lane.policy).rate_seconds, 0) * interval '1 second';
    p_lane.gate.probe_until := null;
  end if;
  if p_lane.policy is distinct from null or (p_lane.gate).held_until is not null then
    v_allowance := fairq._allowance(p_lane.policy, p_lane.gate, p_now, (p_lane.pace).reserved);
  end if;
  p_lane.look_at := v_allowance.look_at;
  p_lane.admissible := coalesce(v_allowance.tasks > 0, true);
  if p_lane.inside is not distinct from null then
    p_lane.cursors := fairq._merge_cursors(p_lane.cursors, p_cursors, p_touched);
  end if;
  return p_lane;
end;
$$;

-- Counts the held tasks of groups that get their first limit, and tells their lanes of the places taken. A task that is being finished or popped is locked, and
-- nobody waits for it with the domain in hand: it takes a place as one that is not counted yet, until it is gone or can be counted. Its lane looks again soon.
-- Locks: held, "skip locked". Cost: all held tasks of the shard. For settings, not for the hot path.
create function fairq._adopt(
  p_tick fairq.ticks, p_lanes fairq.lanes[], p_configured text[], p_now timestamptz, p_of_users boolean default false
) returns fairq.lanes[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  -- How many tasks of each are counted now, and how many are not. An object is looked up in a few steps; with an array each task would be compared with each
  -- group.
  v_places jsonb := (
    select jsonb_object_agg(fairq._line(l.group_key, l.user_key, p_of_users), '[0, 0]'::jsonb)
    from unnest(p_lanes) l
    where fairq._counts(l.policy) and ((l.gate).uncounted > 0 or fairq._line(l.group_key, l.user_key, p_of_users) = any(p_configured))
  );
  v_ids bigint[];
  v_place jsonb;
  v_lane fairq.lanes;
  v_lanes fairq.lanes[] := array[]::fairq.lanes[];
  v_allowance fairq.allowance;
begin
  v_ids := array(
    select h.id
    from fairq.held h
    join fairq.tasks t on t.shard_no = p_tick.shard_no and t.id = h.id
    where h.shard_no = p_tick.shard_no
      and not case when p_of_users then h.user_counted else h.counted end
      and t.queue = p_tick.queue
      and v_places ? fairq._line(t.group_key, t.user_key, p_of_users)
    for update of h skip locked
  );
  with gone as (
    delete from fairq.held h where h.shard_no = p_tick.shard_no and h.id = any(v_ids) returning h
  )
  insert into fairq.held
  select r.*
  from gone g
  cross join lateral jsonb_populate_record(g.h, jsonb_build_object(case when p_of_users then 'user_counted' else 'counted' end, true)) r;
  select v_places || coalesce(jsonb_object_agg(g.line, jsonb_build_array(g.counted, g.uncounted)), '{}') into v_places
  from (
    select i.line, count(*) filter (where i.is_adopted) as counted, count(*) filter (where not i.is_adopted) as uncounted
    from (
      select fairq._line(t.group_key, t.user_key, p_of_users) as line, h.is_adopted
      from (
        select u.id, true as is_adopted from unnest(v_ids) u(id)
        union all
        select k.id, false from fairq.held k where k.shard_no = p_tick.shard_no and not case when p_of_users then k.user_counted else k.counted end
      ) h
      cross join lateral fairq._body(p_tick.shard_no, h.id) t
      where t.queue = p_tick.queue
      union all
      select fairq._line(r.group_key, r.user_key, p_of_users), false
      from fairq.ready r
      where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
        and not case when p_of_users then r.user_counted else r.counted end
    ) i
    where v_places ? i.line
    group by i.line
  ) g;

  foreach v_lane in array p_lanes loop
    v_place := v_places -> fairq._line(v_lane.group_key, v_lane.user_key, p_of_users);
    if v_place is not null then
      v_lane.gate.in_flight := coalesce((v_lane.gate).in_flight, 0) + (v_place ->> 0)::integer;
      v_lane.gate.uncounted := nullif((v_place ->> 1)::integer, 0);
      v_allowance := fairq._allowance(v_lane.policy, v_lane.gate, p_now, (v_lane.pace).reserved);
      v_lane.admissible := v_lane.cursors <> '{}' and v_allowance.tasks > 0;
      v_lane.look_at := case when (v_lane.gate).uncounted > 0 then p_now + interval '100 milliseconds' when v_lane.cursors <> '{}' then v_allowance.look_at end;
    end if;
    v_lanes := v_lanes || v_lane;
  end loop;
  return v_lanes;
end;
$$;

-- The name of a group, or of a user of one, in an object. Inlined.
create function fairq._line(p_group_key text, p_user_key text, p_of_user boolean) returns text
language sql immutable
as $$ select case when p_of_user then jsonb_build_array(p_group_key, p_user_key)::text else p_group_key end $$;

-- Ends those of p_ids that wait and that somebody asked to cancel. Held ones are left: the wish stays, and their holder learns of it with its heartbeat. A
-- ready task that is being popped right now is locked and counts as held. If that pop rolls back the task waits again, so the wish is rung once more.
-- "offset 0": as joins, each of these look-ups could become a walk through all wishes there ever were.
-- Locks: ready and parked with "skip locked"; bodies, which the caller's domain lock protects; cancellations.
create function fairq._cancel_waiting(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_ended bigint[] := fairq._end_waiting(p_shard_no, array(
    select distinct i.id
    from unnest(p_ids) i(id)
    -- retry_task withdraws the wish, not the ring.
    where exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = i.id offset 0)
  ), 'cancelled', p_now);
begin
  perform fairq._remove(p_shard_no, 'cancellations', array(
    select w.ctid
    from unnest(v_ended) t(id)
    cross join lateral (
      select c.ctid
      from fairq.cancellations c
      where c.shard_no = p_shard_no and c.task_id = t.id
      offset 0
    ) w
  ));
  perform fairq._ring_wishes(p_shard_no, p_ids);
end;
$$;
