-- Changes the number of shards while the queues run. configure_cluster lists the groups that are no longer in the shard of their key (fairq.moving). Each call
-- of move_groups moves one of them in one transaction: its tasks, lanes, settings and schedules. Between calls, and after a crash, all is as the last call
-- left it.
--
-- The home of a group is what fairq.moving says, else the shard of its key. Promotion serves a group only in its home. A transaction that looked it up before
-- the group moved, and commits afterwards, leaves tasks in another shard: the promotion that hears of them there sends them home (_send_home). So creating
-- tasks never waits.
--
-- Tasks in flight do not move. A group that has any stops, as if it were paused, until they have ended: eight groups at a time, not counting those that have
-- taken longer than ten seconds.
--
-- During a move, idempotency keys are taken in both shards of their group, the old one first. So a transaction that knows only one of them, because it is older
-- than the move or younger than its end, waits for those that know both. The move ends only when no transaction is left that began before its last step.

-- Moves the next group, and at last what belongs to none. Call it until it says done.
-- Returns {"state": "moving" | "ending" | "waiting" | "done", "from", "to": numbers of shards, "groups": all that have to move, "left": those yet to move,
-- "leaving": those that wait for tasks in flight, "transactions": how many it waits for, "moved": what this call moved}. waiting: nothing can be done now,
-- call again in a moment.
-- Raises QF005 not READ COMMITTED.
-- Locks: settings; the group's settings and schedules; the domains of both shards, of all queues; waits for each 200 ms at most.
-- Cost: two promotions per queue in which the group has anything; its tasks, each written once.
create function fairq.move_groups() returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := clock_timestamp();
  v_settings fairq.settings;
  v_group fairq.moving;
  v_rest record;
  v_state text := 'moving';
  v_moved integer := 0;
  v_is_last boolean;
begin
  perform fairq._check_isolation('moving');
  select s.* into v_settings from fairq.settings s for update;
  if v_settings.moving_from is null then
    return jsonb_build_object('state', 'done', 'from', v_settings.shard_count, 'to', v_settings.shard_count, 'groups', 0, 'left', 0, 'leaving', 0,
      'transactions', 0, 'moved', 0);
  end if;
  perform fairq._greet_workers(v_settings);

  -- Groups that are leaving are tried every 20 ms. No further group begins to leave while eight are.
  select m.* into v_group
  from fairq.moving m
  cross join (select count(*) >= 8 as is_full from fairq.moving l where l.leaving_at > v_now - interval '10 seconds') f
  order by case
      when m.tried_at <= v_now - interval '20 milliseconds' then 1
      when m.tried_at is null and not f.is_full then 2
      when m.tried_at is not null then 3
      else 4
    end, m.tried_at, m.group_key
  limit 1;
  if found then
    v_moved := fairq._move_group(v_group.group_key, v_group.shard_no, fairq._shard_of(v_group.group_key, v_settings.shard_count))::integer;
    if v_moved = 0 then
      v_state := 'waiting';
      update fairq.moving m set tried_at = v_now, leaving_at = coalesce(m.leaving_at, v_now) where m.group_key = v_group.group_key;
    end if;
  else
    -- Once those transactions have ended, nothing new can turn up at an old place.
    v_is_last := v_settings.moving_after is not null and not exists (select from fairq._older_transactions(v_settings.moving_after));
    v_rest := fairq._move_rest(v_settings, v_is_last);
    v_moved := v_rest.o_moved;
    if v_moved = 0 and v_settings.moving_after is null then
      v_settings.moving_after := array(select o.transaction from fairq._older_transactions(null) o(transaction));
      update fairq.settings s set moving_after = v_settings.moving_after;
    end if;
    v_state := case when v_moved > 0 then 'ending' when v_rest.o_done then 'done' else 'waiting' end;
  end if;
  return (
    select jsonb_build_object('state', v_state, 'from', v_settings.moving_from, 'to', v_settings.shard_count, 'groups', v_settings.moving_groups,
      'left', count(*), 'leaving', count(m.leaving_at), 'transactions', (
        select count(*) from fairq._older_transactions(v_settings.moving_after) where v_settings.moving_after is not null
      ), 'moved', coalesce(v_moved, 0))
    from fairq.moving m
  );
end;
$$;
comment on function fairq.move_groups is 'Moves the next group to the shard of its key, after the number of shards has changed. Call it until it says done.';

-- The home of a group.
create function fairq._home(p_group_key text) returns integer
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return (
    select coalesce(m.shard_no, fairq._shard_of(p_group_key, s.shard_count))
    from fairq.settings s
    left join fairq.moving m on s.moving_from is not null and m.group_key = p_group_key
  );
end;
$$;

-- The shards where a task may be when the caller commits: its present one, and, while groups move, the new one of its group. Inlined.
create function fairq._whereabouts(p_shard_no integer, p_group_key text) returns setof integer
language sql stable rows 1 as $$
  select p_shard_no
  union
  select fairq._shard_of(p_group_key, s.shard_count) from fairq.settings s where s.moving_from is not null
$$;

-- The shards in which the idempotency keys of a group are taken, in this order.
create function fairq._key_homes(p_group_key text) returns integer[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return (
    select case when h.old = h.new then array[h.new] else array[h.old, h.new] end
    from fairq.settings s
    cross join lateral (select fairq._shard_of(p_group_key, coalesce(s.moving_from, s.shard_count)), fairq._shard_of(p_group_key, s.shard_count)) h(old, new)
  );
end;
$$;

-- Begins a move. It locks the domains while it lists the groups that promotion knows, or that have settings or schedules. Tasks of other groups are sent home
-- when promotion hears of them.
-- Locks: the domains of the existing shards; the caller holds settings. Cost: all lanes, held and scheduled tasks.
create function fairq._begin_move(p_from integer, p_to integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._check_isolation('moving');
  while not fairq._hold_domains() loop
    perform pg_sleep(0.5);
  end loop;
  -- By the key alone: what the last move left elsewhere, such as an idle lane, does not say where the group is.
  insert into fairq.moving (group_key, shard_no)
  select k.group_key, fairq._shard_of(k.group_key, p_from)
  from (
    -- A user's lane may outlive the lane of the group. A group whose tasks all wait for keys may have none, either.
    select l.group_key from fairq.lanes l where l.queue not like '#%' or l.queue like '#users %'
    union
    select k.group_key from fairq.parked k
    union
    select t.group_key from fairq.held h join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
    union
    select t.group_key from fairq.tasks t where t.scheduled
    union
    select g.group_key from fairq.groups g where g.queue not like '#%'
    union
    select c.group_key from fairq.schedules c
  ) k
  where fairq._shard_of(k.group_key, p_from) <> fairq._shard_of(k.group_key, p_to);
  -- Left over from earlier shards with these numbers: their workers, and idempotency keys that were taken while those shards went.
  delete from fairq.workers w where w.shard_no >= p_from;
  delete from fairq.heartbeats h where h.shard_no >= p_from;
  delete from fairq.idempotency_keys k where k.shard_no >= p_from;
  -- What new shards need: domains, a row for upkeep, and the settings and holds of keys, which every shard has.
  perform fairq._open_domain(s.shard_no, q.queue)
  from generate_series(p_from, p_to - 1) s(shard_no)
  cross join fairq.queues q
  where not q.internal or q.queue = '#keys';
  insert into fairq.maintenance (shard_no) select s.shard_no from generate_series(p_from, p_to - 1) s(shard_no) on conflict do nothing;
  insert into fairq.groups
  select (jsonb_populate_record(g, jsonb_build_object('shard_no', s.shard_no))).*
  from fairq.groups g
  cross join generate_series(p_from, p_to - 1) s(shard_no)
  where g.shard_no = 0 and g.queue = '#keys'
  on conflict do nothing;
  perform fairq._hold_keys(p_from, p_to);
  update fairq.settings s
  set shard_count = p_to, moving_from = p_from, moving_groups = (select count(*) from fairq.moving), moving_after = null;
  update fairq.queues q set spread = true where not q.spread;
end;
$$;

-- Locks all domains, or none: a transaction that promoted and stays open must not keep every other queue waiting.
create function fairq._hold_domains() returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
begin
  perform from fairq.domains d
  where d.queue = '#keys' or d.queue not like '#%'
  order by d.shard_no, d.queue = '#keys', d.queue
  for update;
  return true;
exception when lock_not_available or deadlock_detected then
  return false;
end;
$$;

-- Copies the holds of keys from shard 0 to new shards.
-- Locks: none; the caller holds #keys of shard 0.
create function fairq._hold_keys(p_from integer, p_to integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._open_keys(0, fairq._now());
  insert into fairq.rings (shard_no, queue, group_key, configured, hold_until, held_by)
  select s.shard_no, '#keys', l.group_key, true, (l.gate).held_until, (l.gate).held_by
  from fairq.lanes l
  cross join generate_series(p_from, p_to - 1) s(shard_no)
  where l.shard_no = 0 and l.queue = '#keys' and (l.gate).held_until is not null;
end;
$$;

-- Makes the workers known in new shards, also one that registered while the move began.
create function fairq._greet_workers(p_settings fairq.settings) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into fairq.heartbeats
  select (jsonb_populate_record(h, jsonb_build_object('shard_no', s.shard_no))).*
  from fairq.workers w
  cross join generate_series(p_settings.moving_from, p_settings.shard_count - 1) s(shard_no)
  cross join lateral (select b as row from fairq.heartbeats b where b.shard_no = 0 and b.worker_id = w.worker_id order by b.beat_at desc limit 1) b(h)
  where w.shard_no = 0 and w.lost_at is null
    and not exists (select from fairq.workers k where k.shard_no = s.shard_no and k.worker_id = w.worker_id)
  on conflict do nothing;
  insert into fairq.workers
  select (jsonb_populate_record(w, jsonb_build_object('shard_no', s.shard_no))).*
  from fairq.workers w
  cross join generate_series(p_settings.moving_from, p_settings.shard_count - 1) s(shard_no)
  where w.shard_no = 0 and w.lost_at is null
  on conflict do nothing;
end;
$$;

-- Moves a group. When it has tasks in flight, the group stays, and begins to leave: none of its tasks starts any more. Returns whether the group has moved.
-- Waits at most 200 ms for each lock, then undoes all it did.
-- Locks: the group's settings and schedules; the domains of both shards.
create function fairq._move_group(p_group_key text, p_from integer, p_to integer) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
declare
  v_now timestamptz := fairq._now();
  v_queues text[];
  v_queue text;
begin
  perform from fairq.schedules c where c.shard_no = p_from and c.group_key = p_group_key for update;
  perform from fairq.groups g where g.shard_no = p_from and g.group_key = p_group_key and g.queue not like '#%' for update;
  v_queues := fairq._queues_of_group(p_from, p_group_key);
  insert into fairq.groups as g (shard_no, queue, group_key, leaving_at)
  select p_from, q.queue, p_group_key, v_now
  from unnest(v_queues) q(queue)
  on conflict (shard_no, queue, group_key, user_key) do update
  set leaving_at = coalesce(g.leaving_at, excluded.leaving_at);

  perform from fairq.domains d
  where d.shard_no in (p_from, p_to) and (d.queue = '#keys' or d.queue not like '#%')
  order by d.shard_no, d.queue = '#keys', d.queue
  for update;
  foreach v_queue in array v_queues loop
    perform fairq._stop_group(p_from, v_queue, p_group_key, v_now);
  end loop;
  -- The domains are locked: no other session promotes it from here on.
  if not fairq._queues_of_group(p_from, p_group_key) <@ v_queues
    or exists (
      select from fairq.held h join fairq.tasks t on t.shard_no = p_from and t.id = h.id
      where h.shard_no = p_from and t.group_key = p_group_key
    )
    or exists (
      select from fairq.ready r
      where r.shard_no = p_from and r.queue = any(v_queues) and r.position >= 0 and r.group_key = p_group_key
    )
    or exists (
      select
      from unnest(v_queues) q(queue)
      cross join lateral fairq._lane(p_from, q.queue, p_group_key) l
      where (l.policy).paused_at is null
    )
  then
    return false;
  end if;

  -- Tasks that have strayed to the new shard are first sent here: the lanes that move there know nothing of them.
  foreach v_queue in array v_queues loop
    perform fairq._promote(p_to, v_queue, 1, true, null, 0, (select s.o_floor from fairq._standings(v_queue) s));
  end loop;
  delete from fairq.moving m where m.group_key = p_group_key;
  -- Settings of the group in the new shard are from an earlier time: it was here since.
  delete from fairq.groups g where g.shard_no = p_to and g.group_key = p_group_key and g.queue not like '#%';
  update fairq.groups g
  set shard_no = p_to, leaving_at = null
  where g.shard_no = p_from and g.group_key = p_group_key and g.queue not like '#%';
  delete from fairq.groups g
  where g.shard_no = p_to and g.group_key = p_group_key and g.queue = any(v_queues) and g.user_key = ''
    and jsonb_strip_nulls(to_jsonb(g)) - array['shard_no', 'queue', 'group_key', 'user_key'] = '{}';
  update fairq.schedules c set shard_no = p_to where c.shard_no = p_from and c.group_key = p_group_key;
  foreach v_queue in array v_queues loop
    -- Tasks that wait for a key, or a slot, meet it again in the new shard.
    perform fairq._unpark(p_from, array(select k.id from fairq.parked k where k.shard_no = p_from and k.queue = v_queue and k.group_key = p_group_key));
    perform fairq._move_lanes(p_from, p_to, v_queue, p_group_key);
    perform fairq._send_tasks(p_from, jsonb_build_object(p_group_key, p_to), array(
      select t.ctid from fairq.tasks t where t.shard_no = p_from and t.queue = v_queue and t.group_key = p_group_key and not t.scheduled
    ));
    perform fairq._ring_group(p_to, v_queue, p_group_key);
  end loop;
  return true;
exception when lock_not_available or deadlock_detected then
  return false;
end;
$$;

-- The queues in which a group has a lane, or tasks in line.
create function fairq._queues_of_group(p_shard_no integer, p_group_key text) returns text[]
language plpgsql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
  return array(
    select q.queue
    from fairq.queues q
    where not q.internal
      and (exists (
          select from fairq.lanes l where l.shard_no = p_shard_no and l.queue in (q.queue, fairq._users_of(q.queue)) and l.group_key = p_group_key
        )
        or exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.queue = q.queue and t.group_key = p_group_key and not t.scheduled))
    order by q.queue
  );
end;
$$;

-- Puts the ready tasks of a group, and those granted a key, back in line. Hears its rings, in several passes if many come before them.
-- Locks: ready and parked, "skip locked"; the caller holds the domain and #keys.
create function fairq._stop_group(p_shard_no integer, p_queue text, p_group_key text, p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if ((fairq._lane(p_shard_no, p_queue, p_group_key)).policy).paused_at is null or exists (
    select from fairq.ready r where r.shard_no = p_shard_no and r.queue = p_queue and r.position >= 0 and r.group_key = p_group_key
  ) then
    perform fairq._ring_group(p_shard_no, p_queue, p_group_key);
  end if;
  for v_round in 1 .. 10 loop
    perform fairq._promote(p_shard_no, p_queue, 1, true);
    exit when ((fairq._lane(p_shard_no, p_queue, p_group_key)).policy).paused_at is not null;
  end loop;
  perform fairq._take_keys_back(p_shard_no, p_queue, p_now);
end;
$$;

-- Moves the lanes of a group and its users to the other shard. They keep what is used of their limits, their estimates, and their distance to the clock. They
-- get new lane numbers there, and the rings of their waiting tasks give them new cursors.
-- Locks: lanes; the caller holds both domains, and nothing of the group is ready or held.
create function fairq._move_lanes(p_from integer, p_to integer, p_queue text, p_group_key text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_here fairq.ticks;
  v_there fairq.ticks;
  v_lane fairq.lanes;
  v_last bigint;
begin
  select k.* into v_here from fairq._tick(p_from, p_queue) k;
  select k.* into v_there from fairq._tick(p_to, p_queue) k;
  delete from fairq.lanes l
  where l.shard_no = p_to and l.queue in (p_queue, fairq._users_of(p_queue)) and l.group_key = p_group_key;
  for v_lane in
    select distinct on (l.queue, l.user_key) l.*
    from fairq.lanes l
    where l.shard_no = p_from and l.queue in (p_queue, fairq._users_of(p_queue)) and l.group_key = p_group_key
    order by l.queue, l.user_key, l.version desc
  loop
    v_there.lane_count := v_there.lane_count + 1;
    v_lane.shard_no := p_to;
    v_lane.lane_no := v_there.lane_count;
    -- A lane from before a rebuild stays one: only its limits count.
    v_lane.version := v_there.first_version - (v_lane.version < v_here.first_version)::integer;
    if v_lane.queue = p_queue then
      v_last := v_lane.finish;
      v_lane.finish := v_there.clock + greatest(0, v_lane.finish - v_here.clock);
      v_there.top := greatest(v_there.top, v_lane.finish);
      if v_lane.pace is distinct from null then
        v_lane.pace.last_block := (v_lane.pace).last_block + v_lane.finish - v_last;
        v_lane.pace.reserved := 0;
      end if;
      v_lane.policy := fairq._policy_of(p_to, p_queue, p_group_key);
    end if;
    v_there.users := v_there.users or v_lane.inside is distinct from null or v_lane.line <> '' or v_lane.queue <> p_queue;
    v_lane.position := fairq._lane_position(v_lane.lane_no);
    v_lane.cursors := '{}';
    v_lane.admissible := false;
    v_lane.look_at := null;
    v_lane.keyed := false;
    insert into fairq.lanes select (v_lane).*;
  end loop;
  delete from fairq.lanes l
  where l.shard_no = p_from and l.queue in (p_queue, fairq._users_of(p_queue)) and l.group_key = p_group_key;
  perform fairq._write_tick(v_there);
end;
$$;

-- Sends tasks to the home shards of their groups (p_homes), with rings, as if they had just been created; so also the wishes to cancel them.
-- By ctid and no other way, see _leave.
-- Locks: bodies in line, which the caller's domain protects. Cost: the tasks, each written once.
create function fairq._send_tasks(p_shard_no integer, p_homes jsonb, p_tasks tid[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
declare
  v_gone record;
begin
  with gone as (
    update fairq.tasks t
    set shard_no = (p_homes ->> t.group_key)::integer
    where t.shard_no = p_shard_no and t.ctid = any(p_tasks)
    returning t.shard_no, t.id
  )
  select array_agg(g.id) as ids, array_agg(p_shard_no) as old, array_agg(g.shard_no) as new into v_gone from gone g;
  perform fairq._send_notes(v_gone.ids, v_gone.old, v_gone.new);
end;
$$;

-- Sends what is kept beside the bodies of tasks after them: wishes to cancel, watches, progress. Announces the tasks there.
create function fairq._send_notes(p_ids bigint[], p_from integer[], p_to integer[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_indexscan = on as $$
declare
  v_table text;
begin
  foreach v_table in array array['cancellations', 'watches', 'progress'] loop
    execute format('update fairq.%I n set shard_no = i.new from unnest($1, $2, $3) i(id, old, new) where n.shard_no = i.old and n.task_id = i.id', v_table)
    using p_ids, p_from, p_to;
  end loop;
  perform fairq._announce(t.shard_no, t.ids)
  from (select i.shard_no, array_agg(i.id) as ids from unnest(p_ids, p_to) i(id, shard_no) group by i.shard_no) t;
end;
$$;

-- Sends news of groups whose home is another shard there, together with their tasks; and wishes to cancel a task that has gone elsewhere. Leaves the rest to
-- the caller. At most five thousand tasks, in the order of their lines: for later ones it rings here again, and the next pass goes on with them.
-- Stray tasks that are held stay: their holders look for them here.
-- Locks: bodies in line; the caller holds the domain. In the other shards it only inserts.
-- Cost: where nothing strays, a hash per group that rang.
create function fairq._send_home(
  p_tick fairq.ticks, p_news fairq.news[], p_cancelled bigint[], out o_news fairq.news[], out o_cancelled bigint[]
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_homes jsonb := (
    select jsonb_object_agg(h.group_key, h.shard_no)
    from (
      select n.group_key, coalesce(m.shard_no, fairq._shard_of(n.group_key, s.shard_count)) as shard_no
      from fairq.settings s
      cross join unnest(p_news) n
      left join fairq.moving m on s.moving_from is not null and m.group_key = n.group_key
    ) h
    where h.shard_no <> p_tick.shard_no
  );
  v_gone bigint[];
  v_strays tid[];
begin
  o_news := p_news;
  o_cancelled := p_cancelled;
  v_gone := array(
    select distinct i.id
    from unnest(p_cancelled) i(id)
    where exists (select from fairq.cancellations w where w.shard_no = p_tick.shard_no and w.task_id = i.id offset 0)
      and not exists (select from fairq._body(p_tick.shard_no, i.id))
  );
  if v_gone <> '{}' then
    with away as (
      select t.shard_no, t.queue, t.group_key, t.id, (
          select bool_and(w.unless_held) from fairq.cancellations w where w.shard_no = p_tick.shard_no and w.task_id = t.id
        ) as unless_held
      from unnest(v_gone) i(id)
      cross join fairq._shards(null) s(shard_no)
      cross join lateral fairq._body(s.shard_no, i.id) t
    ),
    wished as (
      insert into fairq.cancellations (shard_no, task_id, requested_at, unless_held)
      select a.shard_no, a.id, fairq._now(), a.unless_held from away a
    )
    insert into fairq.rings (shard_no, queue, group_key, cancelled_id) select a.shard_no, a.queue, a.group_key, a.id from away a;
  end if;
  if v_homes is null then
    return;
  end if;

  with line as materialized (
    select n.group_key, coalesce(n.user_key, '') as user_key, c.priority, min(c.sequence) as sequence, bool_or(n.keyed) as keyed,
      row_number() over (order by n.group_key, coalesce(n.user_key, ''), c.priority desc) as nth
    from unnest(p_news) n
    cross join unnest(n.heard) c
    where v_homes ? n.group_key
    group by n.group_key, coalesce(n.user_key, ''), c.priority
    order by nth
  ),
  stray as materialized (
    select l.nth, t.ctid, t.sequence
    from line l
    cross join lateral (
      select b.ctid, b.sequence
      from fairq.tasks b
      where b.shard_no = p_tick.shard_no and b.queue = p_tick.queue and b.group_key = l.group_key and b.user_key = l.user_key
        and not b.scheduled and -b.priority = -l.priority and b.sequence >= l.sequence
        and not exists (select from fairq._taken(p_tick.shard_no, b.id))
      order by b.sequence
      limit 5001
    ) t
    limit 5001
  ),
  rest as (
    select s.nth, s.sequence from stray s order by s.nth, s.sequence offset 5000
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, user_key, priority, sequence, keyed)
    select p_tick.shard_no, p_tick.queue, l.group_key, nullif(l.user_key, ''), l.priority, case l.nth when r.nth then r.sequence else l.sequence end, l.keyed
    from rest r
    join line l on l.nth >= r.nth
  )
  select array_agg(s.ctid order by s.nth, s.sequence) into v_strays from stray s;
  perform fairq._send_tasks(p_tick.shard_no, v_homes, v_strays[:5000]);
  insert into fairq.rings (shard_no, queue, group_key, user_key, freed, failures, succeeded, configured, used, charged, hold_until, held_by, ran)
  select (v_homes ->> n.group_key)::integer, p_tick.queue, n.group_key, n.user_key, n.freed, n.failures, n.succeeded, n.configured, n.used, n.charged,
    to_timestamp(n.hold[1] / 1000000.0), n.hold[2], n.ran[1]
  from unnest(p_news) n
  where v_homes ? n.group_key
    and (n.freed <> 0 or n.failures > 0 or n.succeeded or n.configured or n.used is not null or n.charged is not null or n.hold is not null);
  insert into fairq.rings (shard_no, queue, group_key, user_key, used, charged, ran)
  select (v_homes ->> n.group_key)::integer, p_tick.queue, n.group_key, n.user_key, 0, 0, r
  from unnest(p_news) n
  cross join lateral unnest(n.ran[2:]) r
  where v_homes ? n.group_key;
  perform fairq._send_settings(p_tick.shard_no, v_homes);
  o_news := (select array_agg(n) from unnest(p_news) n where not v_homes ? n.group_key);
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_tick.queue and q.notify;
end;
$$;

-- Sends home settings, such as a pause, that were written where a group no longer is. If it has a row at home, only a pause is added to that.
create function fairq._send_settings(p_shard_no integer, p_homes jsonb) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  with gone as (
    delete from fairq.groups g
    where g.shard_no = p_shard_no and g.queue not like '#%' and g.group_key = any(array(select jsonb_object_keys(p_homes)))
    returning g
  )
  insert into fairq.groups as g
  select (jsonb_populate_record(n.g, jsonb_build_object('shard_no', (p_homes ->> (n.g).group_key)::integer, 'leaving_at', null))).*
  from gone n
  on conflict (shard_no, queue, group_key, user_key) do update
  set paused_at = coalesce(g.paused_at, excluded.paused_at);
end;
$$;

-- Transactions that run now in this database; or, of p_known, those that still do. A prepared transaction has no number of its own here: while there is one
-- that has used fairq, it counts as old.
create function fairq._older_transactions(p_known text[]) returns setof text
language sql stable set search_path = pg_catalog, pg_temp as $$
  select l.virtualtransaction
  from pg_catalog.pg_locks l
  join pg_catalog.pg_stat_activity a on a.pid = l.pid
  join pg_catalog.pg_database d on d.oid = a.datid and d.datname = current_database()
  where l.locktype = 'virtualxid' and l.mode = 'ExclusiveLock' and l.granted and l.pid <> pg_backend_pid()
    and a.backend_type is distinct from 'autovacuum worker'
    and (p_known is null or l.virtualtransaction = any(p_known))
  union all
  select l.virtualtransaction
  from pg_catalog.pg_locks l
  where l.pid is null and l.relation = 'fairq.settings'::regclass and p_known is not null
$$;

-- Moves some of what belongs to no group, or came to its old place after the group had gone: scheduled tasks, schedules and settings, a thousand of each. Once
-- no older transaction is left (p_is_last), also idempotency keys, and the history of shards that go, as far as the ledger has counted it everywhere; and ends
-- the move when nothing is left.
-- Returns how many rows it moved, and whether the move is over. Waits at most 200 ms for each lock, then undoes all it did, and o_moved is null: upkeep, which
-- holds the lock of its rows, may be waiting for a domain.
-- Locks: these rows, "skip locked"; and the domains of old shards that have news.
create function fairq._move_rest(p_settings fairq.settings, p_is_last boolean, out o_moved integer, out o_done boolean)
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
declare
  v_to integer := p_settings.shard_count;
  v_counted timestamptz;
  v_gone record;
begin
  o_done := false;
  with stray as materialized (
    select t.shard_no, t.id from fairq.tasks t where t.scheduled and t.shard_no <> fairq._shard_of(t.group_key, v_to) limit 1000 for update skip locked
  ),
  gone as (
    update fairq.tasks t
    set shard_no = fairq._shard_of(t.group_key, v_to)
    from stray s
    where t.shard_no = s.shard_no and t.id = s.id
    returning s.shard_no as was_in, t.shard_no, t.id
  )
  select count(*)::integer as tasks, array_agg(g.id) as ids, array_agg(g.was_in) as old, array_agg(g.shard_no) as new into v_gone from gone g;
  o_moved := v_gone.tasks;
  perform fairq._send_notes(v_gone.ids, v_gone.old, v_gone.new);

  -- A schedule that is in the new shard, too, was configured again after the group had gone: that one counts.
  with stray as materialized (
    select c.shard_no, c.name, c.group_key from fairq.schedules c where c.shard_no <> fairq._shard_of(c.group_key, v_to) limit 1000 for update skip locked
  ),
  gone as (
    delete from fairq.schedules c using stray s where c.shard_no = s.shard_no and c.name = s.name and c.group_key = s.group_key returning c
  ),
  back as (
    insert into fairq.schedules
    select (jsonb_populate_record(g.c, jsonb_build_object('shard_no', fairq._shard_of((g.c).group_key, v_to)))).* from gone g
    on conflict do nothing
  )
  select o_moved + count(*)::integer into o_moved from gone g;
  for v_gone in
    select distinct g.shard_no, g.group_key
    from fairq.groups g
    where g.queue not like '#%' and g.shard_no <> fairq._shard_of(g.group_key, v_to)
    limit 1000
  loop
    perform fairq._send_settings(v_gone.shard_no, jsonb_build_object(v_gone.group_key, fairq._shard_of(v_gone.group_key, v_to)));
    o_moved := o_moved + 1;
  end loop;
  if o_moved > 0 or not p_is_last then
    return;
  end if;

  -- Most keys were taken during the move, and are in the new shard already. Where the new shard names another task, the old one is right: a transaction that
  -- knew only the old shard took the key last. Keys in neither are left from another move. Their age begins anew: the history of an ended task may still be in
  -- the other shard, where the sweep of this one does not see it.
  with stray as materialized (
    select k.shard_no, k.queue, k.group_key, k.idempotency_key, k as row
    from fairq.idempotency_keys k
    where k.shard_no <> fairq._shard_of(k.group_key, v_to)
    limit 5000 for update skip locked
  ),
  gone as (
    delete from fairq.idempotency_keys k
    using stray s
    where k.shard_no = s.shard_no and k.queue = s.queue and k.group_key = s.group_key and k.idempotency_key = s.idempotency_key
  ),
  back as (
    insert into fairq.idempotency_keys as k
    select (jsonb_populate_record(s.row, jsonb_build_object('shard_no', fairq._shard_of(s.group_key, v_to), 'created_at', fairq._now()))).*
    from stray s
    where s.shard_no = fairq._shard_of(s.group_key, p_settings.moving_from)
    on conflict (shard_no, queue, group_key, idempotency_key) do update
    set task_id = excluded.task_id, fingerprint = excluded.fingerprint, created_at = excluded.created_at
    where k.task_id <> excluded.task_id
    returning k.task_id
  )
  -- Keys that keep being taken, in both shards, do not keep the move from ending.
  select (case when count(*) = 5000 then 5000 else (select count(*) from back) end)::integer into o_moved from stray s;
  -- Rings that no promotion has heard yet go home.
  for v_gone in
    select d.shard_no, d.queue
    from fairq.domains d
    where d.shard_no < p_settings.moving_from and (d.queue = '#keys' or d.queue not like '#%')
      and not exists (select from fairq._tick(d.shard_no, d.queue) k where not fairq._has_news(k))
    order by d.shard_no, d.queue = '#keys'
  loop
    if v_gone.queue <> '#keys' then
      perform fairq._promote(v_gone.shard_no, v_gone.queue, 1, false);
    elsif fairq._lock_domain(v_gone.shard_no, '#keys', false) then
      perform fairq._open_keys(v_gone.shard_no, fairq._now());
    end if;
  end loop;
  if o_moved = 0 and p_settings.moving_from > v_to then
    perform fairq._keep_ledger(m.shard_no, fairq._now())
    from (select m.shard_no from fairq.maintenance m order by m.shard_no for update skip locked) m
    where fairq._ledger_until(0) is not null;
    v_counted := coalesce((select min(fairq._ledger_until(s.shard_no)) from fairq._shards(null) s(shard_no)), 'infinity');
    -- By ctid. The partition of another day may have it, too: the conditions below make sure that such a row has to move as well.
    with gone as (
      update fairq.finished_tasks f
      set shard_no = fairq._shard_of(f.group_key, v_to)
      where f.ctid = any(array(select n.ctid from fairq.finished_tasks n where n.shard_no >= v_to and n.finished_at < v_counted limit 5000))
        and f.shard_no >= v_to and f.finished_at < v_counted
      returning f.id
    ),
    tried as (
      update fairq.attempts a
      set shard_no = a.shard_no % v_to
      where a.ctid = any(array(select n.ctid from fairq.attempts n where n.shard_no >= v_to and n.ended_at < v_counted limit 5000))
        and a.shard_no >= v_to and a.ended_at < v_counted
      returning a.task_id
    )
    select count(*)::integer into o_moved from (select from gone union all select from tried) x;
  end if;
  o_done := o_moved = 0 and fairq._end_move(p_settings);
exception when lock_not_available or deadlock_detected then
  o_moved := null;
  o_done := false;
end;
$$;

-- Ends a move, once the shards that go are empty. Adds their ledger and totals to those of shard 0.
-- Returns false when something is left, or another session is at work there.
create function fairq._end_move(p_settings fairq.settings) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_to integer := p_settings.shard_count;
  v_table text;
begin
  -- A worker that registered, or a hold of a key, at the last moment knew only the old shards.
  perform fairq._greet_workers(p_settings);
  if not fairq._lock_domain(0, '#keys', false) then
    return false;
  end if;
  perform fairq._hold_keys(p_settings.moving_from, v_to);
  -- A key that another transaction is just taking over from its task, and may yet give back.
  if exists (
    select
    from fairq.idempotency_keys k
    where k.shard_no <> fairq._shard_of(k.group_key, v_to)
      and not exists (
        select
        from fairq.idempotency_keys n
        where n.shard_no = fairq._shard_of(k.group_key, v_to) and n.queue = k.queue and n.group_key = k.group_key and n.idempotency_key = k.idempotency_key
          and n.task_id = k.task_id
      )
  ) then
    return false;
  end if;
  if p_settings.moving_from > v_to then
    if (select count(*) from fairq.domains d where d.shard_no >= v_to)
        <> (select count(*) from (select from fairq.domains d where d.shard_no >= v_to for update skip locked) d)
      or exists (select from fairq.domains d cross join lateral fairq._tick(d.shard_no, d.queue) k where d.shard_no >= v_to and fairq._has_news(k))
      or exists (select from fairq.tasks t where t.shard_no >= v_to)
      or exists (select from fairq.held h where h.shard_no >= v_to)
      or exists (select from fairq.finished_tasks f where f.shard_no >= v_to)
      or exists (select from fairq.attempts a where a.shard_no >= v_to)
    then
      return false;
    end if;
    perform fairq._add_ledger(s.shard_no) from generate_series(v_to, p_settings.moving_from - 1) s(shard_no);
    -- Workers stay: a pop under way may look them up. So do idempotency keys that are being taken right now, for this does not wait for them. The next move
    -- deletes both.
    foreach v_table in array array['domains', 'maintenance', 'ticks', 'lanes', 'rings', 'sweeps', 'upkeep_failures', 'ready', 'parked', 'cancellations',
      'watches', 'progress', 'limit_changes', 'ledger', 'ledger_queues', 'ledger_marks', 'totals', 'groups']
    loop
      execute format('delete from fairq.%I n where n.shard_no >= $1', v_table) using v_to;
    end loop;
    update fairq.queues q set spread = false where v_to = 1 and q.spread;
  end if;
  -- Deadlines may have passed while tasks moved: upkeep looks at all of them once more.
  delete from fairq.sweeps w where w.shard_no < v_to and w.what = 'expiry';
  update fairq.settings s set moving_from = null, moving_groups = null, moving_after = null;
  return true;
end;
$$;

-- Adds the ledger of a shard that goes to that of shard 0.
create function fairq._add_ledger(p_shard_no integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into fairq.ledger as o
  select (jsonb_populate_record(l, '{"shard_no": 0}')).* from fairq.ledger l where l.shard_no = p_shard_no
  on conflict (shard_no, begins_at, queue, group_key) do update
  set groups = case o.group_key when '' then o.groups + excluded.groups else o.groups end, waiting_since = least(o.waiting_since, excluded.waiting_since),
    weight = case o.group_key when '' then o.weight + excluded.weight else o.weight end, tasks = o.tasks + excluded.tasks, ended = o.ended + excluded.ended,
    cost = o.cost + excluded.cost, seconds = o.seconds + excluded.seconds, ran = o.ran + excluded.ran, service = o.service + excluded.service,
    entitled = o.entitled + excluded.entitled, largest = greatest(o.largest, excluded.largest), slack = o.slack + excluded.slack,
    judged = o.judged and excluded.judged, waits = fairq._add_histograms(o.waits, excluded.waits);
  insert into fairq.ledger_queues as o
  select (jsonb_populate_record(l, '{"shard_no": 0}')).* from fairq.ledger_queues l where l.shard_no = p_shard_no
  on conflict (shard_no, begins_at, queue) do update
  set workers = greatest(o.workers, excluded.workers), slots = greatest(o.slots, excluded.slots),
    waiting_since = least(o.waiting_since, excluded.waiting_since), tasks = o.tasks + excluded.tasks, ended = o.ended + excluded.ended,
    seconds = o.seconds + excluded.seconds, ran = o.ran + excluded.ran,
    judged = o.judged and excluded.judged, waits = fairq._add_histograms(o.waits, excluded.waits),
    newcomers = fairq._add_histograms(o.newcomers, excluded.newcomers);
  insert into fairq.totals as o
  select (jsonb_populate_record(l, '{"shard_no": 0}')).* from fairq.totals l where l.shard_no = p_shard_no
  on conflict (shard_no, queue, kind, outcome) do update
  set tasks = o.tasks + excluded.tasks, seconds = o.seconds + excluded.seconds, waited = o.waited + excluded.waited,
    runs = fairq._add_histograms(o.runs, excluded.runs), waits = fairq._add_histograms(o.waits, excluded.waits);
end;
$$;
