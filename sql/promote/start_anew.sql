-- All that promotion knows can be thrown away and made anew from bodies and holders, at any time (I11). It does so by itself when a domain has no tick it can
-- trust, as after a dump was restored into a cluster with other transaction ids; fairq.rebuild() is for people.
-- No part of it reads all tasks at once, however many there are: ready tasks go back in line, holders are counted, the clock goes past every lane there was,
-- and the bodies are announced again, a portion with each pass.

-- Makes a domain, with its first tick: what is rung from now on will be heard.
create function fairq._open_domain(p_shard_no integer, p_queue text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into fairq.domains (shard_no, queue) values (p_shard_no, p_queue) on conflict do nothing;
  if found then
    perform fairq._write_tick(fairq._blank_tick(p_shard_no, p_queue, 0, pg_current_snapshot()));
  end if;
end;
$$;

-- A tick that knows nothing, and hears every ring that is not visible in the snapshot, and those of its own transaction. Not written yet.
create function fairq._blank_tick(p_shard_no integer, p_queue text, p_tick bigint, p_snapshot pg_snapshot) returns fairq.ticks
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_tick fairq.ticks := jsonb_populate_record(null::fairq.ticks, '{"clock": 0, "clock_position": 0, "newcomer_position": 0, "top": 0, "heard_xid": "0",
    "heard_ring": 0, "lane_count": 0, "touched": 0, "first_version": 1, "filled": 0, "keyed": false, "users": false}');
begin
  v_tick.shard_no := p_shard_no;
  v_tick.queue := p_queue;
  v_tick.tick := p_tick;
  v_tick.next_xid := pg_snapshot_xmax(p_snapshot);
  v_tick.pending := array(
    select (p.xid, 0)::fairq.heard
    from (select pg_snapshot_xip(p_snapshot) union select pg_current_xact_id()) p(xid)
    where p.xid < v_tick.next_xid
    order by p.xid
  );
  return v_tick;
end;
$$;

-- Forgets what promotion knows of a domain. The counters have no order to lose: their places are counted anew, and nothing else.
-- A ready task that is being popped is waited for: if that pop rolled back, nobody would look for the task where it was.
-- One statement counts the places of all holders, removes the rings that the count covers, and gives the snapshot. If these were taken a moment apart, a task
-- that left in between would be missing in the count already, and its ring, which the tick takes for pending, would be subtracted once more.
-- Returns the tick it wrote.
-- Locks: ready, rings, parked of the domain; the caller holds the domain.
-- Cost: ready and held tasks (of all shards for the meters), and the rings that were not swept yet.
create function fairq._start_anew(p_shard_no integer, p_queue text) returns fairq.ticks
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_counts_only boolean := p_queue like '#%';
  v_snapshot pg_snapshot;
  v_last record;
  v_heard fairq.ticks;
  v_tick fairq.ticks;
  v_ready tid[];
begin
  select coalesce(max(k.tick), 0) as tick, coalesce(max(greatest(k.top, k.clock)), 0) as top into v_last
  from fairq.ticks k
  where k.shard_no = p_shard_no and k.queue = p_queue;
  select k.* into v_heard from fairq.ticks k where k.shard_no = p_shard_no and k.queue = p_queue and k.tick = v_last.tick;
  -- Transaction ids, ticks and the clock may begin below where the sweeps have come.
  delete from fairq.sweeps w
  where w.shard_no = p_shard_no
    and w.what in ('rings ' || p_queue, 'late rings ' || p_queue, 'ticks ' || p_queue, 'lanes ' || p_queue);
  if v_counts_only then
    -- What was used of a rate, and breakers, stay: nothing else knows them.
    update fairq.lanes l
    set gate = (0, null, (l.gate).rate_at, (l.gate).failures, (l.gate).open_until, (l.gate).probe_until, null, null, (l.gate).held_until,
        (l.gate).held_by)::fairq.gate,
      look_at = case when p_queue = '#keys' then greatest(fairq._now(), (l.gate).held_until) end
    where l.shard_no = p_shard_no and l.queue = p_queue;
  else
    perform fairq._lock_counters(p_shard_no, '#keys', true);
    -- Pops in flight are waited for here, in a statement of its own: the next one sees what they hold.
    v_ready := array(
      select r.ctid from fairq.ready r where r.shard_no = p_shard_no and r.queue = p_queue and r.position >= 0 for update
    );
  end if;

  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue
    -- What the last tick has not heard of.
    returning r.group_key, r.user_key, r.ring_id, r.failures, r.succeeded, r.used, r.hold_until, r.held_by,
      r.xid >= v_heard.next_xid and (r.xid <> v_heard.heard_xid or r.ring_id > v_heard.heard_ring)
      or exists (select from unnest(v_heard.pending) p where p.xid = r.xid and p.ring_id < r.ring_id) as is_news
  ),
  given as (
    -- Who waits for a key, and who is given one, is found out again.
    delete from fairq.parked k
    where k.shard_no = p_shard_no and k.queue = p_queue and k.granted
    returning fairq._key_of(k) as concurrency_key
  ),
  freed as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select p_shard_no, '#keys', k.concurrency_key, count(*)
    from (
      select t.concurrency_key
      from fairq.ready r
      join fairq.tasks t on t.shard_no = p_shard_no and t.id = r.id
      where r.shard_no = p_shard_no and r.queue = p_queue and r.position >= 0 and r.keyed_at is not null
      union all
      select v.concurrency_key from given v where v.concurrency_key is not null
    ) k
    group by k.concurrency_key
  ),
  holder as (
    select h.shard_no, t.queue, t.group_key, t.user_key, h.counted, h.user_counted, h.meters, case when h.keyed then t.concurrency_key end as concurrency_key, h.charge
    from fairq._shards(case when p_queue = '#keys' or not v_counts_only then p_shard_no end) x(shard_no)
    join fairq.held h on h.shard_no = x.shard_no
    join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
    union all
    select r.shard_no, t.queue, t.group_key, t.user_key, false, false, 0, t.concurrency_key, null
    from fairq.ready r
    join fairq.tasks t on t.shard_no = p_shard_no and t.id = r.id
    where p_queue = '#keys' and r.shard_no = p_shard_no and r.keyed_at is not null
    union all
    select k.shard_no, k.queue, k.group_key, k.user_key, false, false, 0, fairq._key_of(k), null
    from fairq.parked k
    where p_queue = '#keys' and k.shard_no = p_shard_no and (k.granted or k.concurrency_key = '')
  ),
  taken as (
    select s.group_key, s.user_key, count(*) as places
    from holder h
    cross join lateral fairq._scopes(h.shard_no, h.queue, h.group_key, h.counted, h.meters, h.concurrency_key,
      case when h.user_counted then h.user_key end) s
    where s.shard_no = p_shard_no and s.queue = p_queue
    group by s.group_key, s.user_key
  ),
  expected as (
    select h.group_key, nullif(h.user_key, '') as user_key, -sum(h.charge) as charged
    from holder h
    where h.queue = p_queue and not v_counts_only
    group by h.group_key, h.user_key
  ),
  counter as (
    -- The settings of all that have tasks in flight are looked up: a first cap may have come that did not count them yet.
    select t.group_key, t.user_key from taken t
    union
    select h.group_key, u.user_key
    from holder h
    cross join lateral (values (null), (nullif(h.user_key, ''))) u(user_key)
    where h.queue = p_queue
    union
    -- Only the lane knows what was spent in this period and who is held, so it comes along.
    select l.group_key, null
    from fairq.lanes l
    where not v_counts_only and l.shard_no = p_shard_no and l.queue = p_queue and ((l.gate).spent > 0 or (l.gate).held_until is not null)
    union
    -- Counters with settings, and keys that somebody waits for, are looked at again.
    select g.group_key, null from fairq.groups g where v_counts_only and g.shard_no = p_shard_no and g.queue = p_queue
    union
    select substr(p_queue, 2), null where v_counts_only and p_queue <> '#keys'
    union
    select k.concurrency_key, null from fairq.parked k where p_queue = '#keys' and k.shard_no = p_shard_no and k.turn is not null and k.concurrency_key <> ''
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, user_key, freed, configured, charged)
    select p_shard_no, p_queue, c.group_key, c.user_key, -coalesce(t.places, 0), true, e.charged
    from counter c
    left join taken t on t.group_key = c.group_key and t.user_key is not distinct from c.user_key
    left join expected e on e.group_key = c.group_key and e.user_key is not distinct from c.user_key
  ),
  -- What was used is spent even if it was not heard of yet, holds stay, and breakers hear how attempts ended, in this order.
  kept as (
    insert into fairq.rings (shard_no, queue, group_key, user_key, failures, succeeded, used, charged, hold_until, held_by, configured)
    select p_shard_no, p_queue, f.group_key, case when f.failures > 0 or f.succeeded then f.user_key end, f.failures, f.succeeded, f.used,
      case when f.used > 0 then 0 end, f.hold_until, f.held_by, f.hold_until is not null
    from forgotten f
    where f.is_news and (f.used > 0 or f.hold_until is not null or f.failures > 0 or f.succeeded)
    order by f.ring_id
  )
  select pg_current_snapshot() into v_snapshot;

  v_tick := fairq._blank_tick(p_shard_no, p_queue, v_last.tick, v_snapshot);
  if v_counts_only then
    v_tick.next_due_at := (select min((l.gate).held_until) from fairq.lanes l where l.shard_no = p_shard_no and l.queue = p_queue);
  end if;
  if not v_counts_only then
    perform fairq._remove(p_shard_no, 'ready', v_ready);
    v_tick.clock := v_last.top + fairq._round();
    v_tick.top := v_tick.clock;
    -- Versions go on where the lanes of before end. The highest sequence ever given is the last id.
    select coalesce(max(l.version), 0) + 1, coalesce(max(l.lane_no), 0) into v_tick.first_version, v_tick.lane_count
    from fairq.lanes l
    where l.shard_no = p_shard_no and l.queue in (p_queue, fairq._users_of(p_queue));
    v_tick.touched := (select s.last_value from fairq.task_ids s);
    v_tick.announce_from := (select min(t.id) from fairq.tasks t where t.shard_no = p_shard_no);
    -- Service before and after is not compared: every interval begins anew.
    insert into fairq.limit_changes (shard_no, queue, group_key, until) values (p_shard_no, p_queue, '', fairq._now());
  end if;
  return fairq._write_tick(v_tick);
end;
$$;

-- After a rebuild: rings for the next portion of bodies, as if they had just been created. Those that were parked are parked no more, and pass their group's
-- turn on.
-- Locks: parked; the caller holds the domain and #keys.
-- Cost: 5000 entries of tasks_pkey.
create function fairq._announce_bodies(p_tick fairq.ticks) returns fairq.ticks
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_portion record;
begin
  if p_tick.announce_from is null then
    return p_tick;
  end if;
  select count(*) as tasks, max(p.id) as last_id, array_agg(p.id) filter (where p.queue = p_tick.queue) as ids
  into v_portion
  from (
    select t.id, t.queue
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no and t.id >= p_tick.announce_from
    order by t.id
    limit 5000
  ) p;
  perform fairq._announce(p_tick.shard_no, v_portion.ids);
  perform fairq._unpark(p_tick.shard_no, array(
    select k.id from fairq.parked k where k.shard_no = p_tick.shard_no and k.id = any(v_portion.ids) and not k.granted
  ));
  p_tick.announce_from := case when v_portion.tasks = 5000 then v_portion.last_id + 1 end;
  return p_tick;
end;
$$;
