-- Removes what promotion has left behind in a domain: rings that every later tick would ignore; all ticks but the last; and lanes of idle groups whose turn is
-- used up, which would start at the clock anyway. At most p_limit of each.
-- Returns how many rows it removed.
-- Locks: the rows it removes; the caller holds the domain.
create function fairq._sweep_domain(p_shard_no integer, p_queue text, p_limit integer) returns integer
language plpgsql set search_path = pg_catalog, pg_temp set enable_sort = off as $$
declare
  v_tick fairq.ticks;
  v_floor bigint;
  v_from timestamptz;
  v_unheard xid8[];
  v_found record;
  v_swept integer := 0;
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if not found then return 0; end if;

  -- fairq.sweeps notes transactions that were open when a sweep passed their rings, which are removed once they are heard: so the floor does not wait for the
  -- longest transaction. But it does not pass a transaction that was heard in part: its rings may be many, and will be heard soon.
  v_unheard := array(select p.xid from unnest(v_tick.pending) p) || v_tick.heard_xid;
  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'rings ' || p_queue), 0);
  with heard as materialized (
    select r.ctid, r.xid from fairq.rings r
    where r.shard_no = p_shard_no and r.queue = p_queue and r.xid >= v_floor::text::xid8
      and r.xid < least(v_tick.next_xid, (select min(p.xid::text::bigint)::text::xid8 from unnest(v_tick.pending) p where p.ring_id > 0))
      and r.xid <> all(v_unheard)
    order by r.xid limit p_limit
  )
  select array_agg(h.ctid) as ctids, max(h.xid::text::bigint) as last into v_found from heard h;
  v_swept := v_swept + fairq._remove(p_shard_no, 'rings', v_found.ctids) + fairq._sweep_late_rings(p_shard_no, p_queue, v_tick, v_unheard, v_found.last);
  perform fairq._set_sweep_floor(p_shard_no, 'rings ' || p_queue, v_found.last);

  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'ticks ' || p_queue), 0);
  with old as materialized (
    select k.ctid, k.tick from fairq.ticks k
    where k.shard_no = p_shard_no and k.queue = p_queue and k.tick >= v_floor and k.tick < v_tick.tick
    order by k.tick limit p_limit
  )
  select array_agg(o.ctid) as ctids, max(o.tick) as last into v_found from old o;
  v_swept := v_swept + fairq._remove(p_shard_no, 'ticks', v_found.ctids);
  perform fairq._set_sweep_floor(p_shard_no, 'ticks ' || p_queue, v_found.last);

  -- A lane stays for now, and the floor before it, while its rate is not paid for, its budget is partly spent, or it is held: no ring tells of the end of
  -- these. It stays, too, while long tasks wait for a slot, because only the lane knows that they are long; and while its users wait or hold places, because a
  -- group without a lane would begin as one without users, beside their lanes. A lane whose breaker has counted failures stays until the group succeeds; that
  -- rings.
  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'lanes ' || p_queue), 0);
  with idle as materialized (
    select l.ctid, l.finish,
      coalesce(greatest((l.gate).rate_at, case when (l.gate).spent > 0 then (l.gate).spent_until end, (l.gate).held_until), '-infinity') <= fairq._now()
      and not exists (
        select from fairq.parked k
        where k.shard_no = p_shard_no and k.concurrency_key = '' and k.queue = l.queue and k.group_key = l.group_key and not k.granted
      )
      and not exists (
        select from fairq.lanes u
        where l.inside is distinct from null and u.shard_no = p_shard_no and u.queue = fairq._users_of(l.queue) and u.group_key = l.group_key
          and u.version >= v_tick.first_version and (u.cursors <> '{}' or (u.gate).in_flight > 0)
      ) as is_paid
    from fairq.lanes l
    where l.shard_no = p_shard_no and l.queue = p_queue and l.user_key = '' and not l.admissible
      -- Not the lane of a meter: a pop asks it without looking at settings, so it must always be there.
      and l.queue not like '#%' and l.finish >= v_floor and l.finish <= v_tick.clock
      and (l.cursors = '{}' or l.version < v_tick.first_version)
      and (l.version < v_tick.first_version or l.gate is null or (l.gate).in_flight = 0 and (l.gate).open_until is null and coalesce((l.gate).failures, 0) = 0)
      and (l.version < v_tick.first_version or coalesce((l.pace).reserved, 0) = 0)
    order by l.finish limit p_limit
  )
  select array_agg(i.ctid) filter (where i.is_paid) as ctids, coalesce(min(i.finish) filter (where not i.is_paid), max(i.finish)) as last into v_found
  from idle i;
  v_swept := v_swept + fairq._remove(p_shard_no, 'lanes', v_found.ctids);
  perform fairq._set_sweep_floor(p_shard_no, 'lanes ' || p_queue, v_found.last);

  if v_tick.users then
    v_swept := v_swept + fairq._sweep_users(v_tick, p_limit);
    perform fairq._rebase_users(v_tick, l.group_key, (l.inside).clock - 1099511627776)
    from fairq.lanes l
    where l.shard_no = p_shard_no and l.queue = p_queue and (l.inside).clock > 288230376151711744;
  end if;

  if p_queue = '#keys' then
    v_from := fairq._time_floor(p_shard_no, 'idle keys', fairq._now());
    with idle as materialized (
      select l.ctid, l.look_at from fairq.lanes l
      where l.shard_no = p_shard_no and l.queue = p_queue and l.look_at >= v_from
        and l.look_at <= fairq._now() - interval '1 minute'
      order by l.look_at limit p_limit
    )
    select array_agg(i.ctid) as ctids, max(i.look_at) as last into v_found from idle i;
    v_swept := v_swept + fairq._remove(p_shard_no, 'lanes', v_found.ctids);
    perform fairq._set_sweep_floor(p_shard_no, 'idle keys', (extract(epoch from v_found.last) * 1000000)::bigint);
  end if;

  -- When no waiting task has a key any more, promotion no longer needs the lock of #keys. When no user has a lane any more, it need not look for users.
  select v_tick.keyed and (exists (select from fairq.lanes l where l.shard_no = p_shard_no and l.queue in (p_queue, fairq._users_of(p_queue)) and l.keyed)
      or exists (select from fairq.parked k where k.shard_no = p_shard_no and k.queue = p_queue)) as keyed,
    v_tick.users and (exists (select from fairq.lanes l where l.shard_no = p_shard_no and l.queue = fairq._users_of(p_queue))
      or exists (select from fairq.lanes l where l.shard_no = p_shard_no and l.queue = p_queue and (l.inside is not null or l.line <> ''))) as users
  into v_found;
  if (v_found.keyed, v_found.users) <> (v_tick.keyed, v_tick.users) then
    v_tick.keyed := v_found.keyed;
    v_tick.users := v_found.users;
    perform fairq._write_tick(v_tick);
  end if;

  -- Lanes from before a rebuild do not count, even if they are admissible.
  return v_swept + fairq._remove(p_shard_no, 'lanes', array(
    select l.ctid from fairq.lanes l
    where l.shard_no = p_shard_no and l.queue = p_queue and l.user_key = '' and l.admissible and l.finish >= v_floor and l.finish < v_tick.clock
      and l.version < v_tick.first_version and coalesce((l.gate).spent, 0) = 0
    order by l.finish limit p_limit
  ));
end;
$$;

-- Removes lanes of idle users whose turn is used up, or whose group has no lane any more. Like those of groups they stay while they are to be charged for
-- tasks in flight.
-- Returns how many rows it removed. Cost: the lanes of the domain's users.
create function fairq._sweep_users(p_tick fairq.ticks, p_limit integer) returns integer
language sql set search_path = pg_catalog, pg_temp as $$
  select fairq._remove(p_tick.shard_no, 'lanes', array(
    select l.ctid
    from fairq.lanes l
    cross join lateral (select (fairq._lane(p_tick.shard_no, p_tick.queue, l.group_key)).inside offset 0) g
    where l.shard_no = p_tick.shard_no and l.queue = fairq._users_of(p_tick.queue)
      and (l.version < p_tick.first_version
        or (not l.admissible
          and l.cursors = '{}'
          and (l.finish <= (g.inside).clock or g.inside is not distinct from null)
          and coalesce((l.pace).reserved, 0) = 0
          and (l.gate is null or (l.gate).in_flight = 0 and (l.gate).open_until is null and coalesce((l.gate).failures, 0) = 0
            and coalesce((l.gate).rate_at, '-infinity') <= fairq._now())))
    limit p_limit
  ))
$$;

-- Sets the virtual time of a group's users back, long before a bigint is full, as _rebase does for a domain; not to zero, for ready tasks lie behind it.
-- Locks: ready (waits for a pop in flight); lanes; the caller holds the domain.
create function fairq._rebase_users(p_tick fairq.ticks, p_group_key text, p_distance bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  update fairq.ready r
  set user_block = greatest(0, r.user_block - p_distance)
  where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0 and r.group_key = p_group_key;
  update fairq.lanes l
  set finish = case when l.inside is not distinct from null then greatest(0, l.finish - p_distance) else l.finish end,
    inside = case when l.inside is distinct from null then ((l.inside).clock - p_distance, (l.inside).position, (l.inside).top - p_distance)::fairq.inside end,
    pace = case
      when l.inside is not distinct from null and l.pace is distinct from null
        then (greatest(-1, (l.pace).last_block - p_distance), (l.pace).credit, (l.pace).estimates, (l.pace).unit, (l.pace).reserved)::fairq.pace
      else l.pace
    end
  where l.shard_no = p_tick.shard_no and l.queue in (p_tick.queue, fairq._users_of(p_tick.queue)) and l.group_key = p_group_key;
end;
$$;

-- Notes transactions that were still open when the sweep passed their rings, by id, and removes these rings once a tick has heard them.
-- Returns how many rings it removed.
create function fairq._sweep_late_rings(p_shard_no integer, p_queue text, p_tick fairq.ticks, p_unheard xid8[], p_passed bigint) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_what text := 'late rings ' || p_queue;
  v_done bigint[];
begin
  insert into fairq.sweeps (shard_no, what, floor)
  select p_shard_no, v_what, u.xid::text::bigint from unnest(p_unheard) u(xid)
  where u.xid::text::bigint <= p_passed
  on conflict do nothing;

  v_done := array(
    select w.floor from fairq.sweeps w
    where w.shard_no = p_shard_no and w.what = v_what and w.floor < p_tick.next_xid::text::bigint
      and w.floor::text::xid8 <> all(p_unheard)
    order by w.floor limit 1000
  );
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what = v_what and w.floor = any(v_done);
  return fairq._remove(p_shard_no, 'rings', array(
    select r.ctid
    from unnest(v_done) d(xid)
    cross join lateral (
      select k.ctid from fairq.rings k
      where k.shard_no = p_shard_no and k.queue = p_queue and k.xid = d.xid::text::xid8
      offset 0
    ) r
  ));
end;
$$;

-- Removes wishes to cancel and progress whose task is gone, watches that ran out, idempotency keys whose task ended longer ago than the retention, and rows of
-- the ledger and the history's default partitions past every queue's retention. At most p_limit of each.
-- Returns how many rows it removed.
create function fairq._sweep_notes(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_floor timestamptz := fairq._time_floor(p_shard_no, 'keys', p_now);
  v_oldest timestamptz := p_now - (select max(q.retention) from fairq.queues q where not q.internal);
  v_swept integer;
begin
  v_swept := fairq._remove(p_shard_no, 'cancellations', array(
    select n.ctid from fairq.cancellations n
    where n.shard_no = p_shard_no
      and not exists (select from fairq._body(p_shard_no, n.task_id))
    limit p_limit
  ))
  + fairq._remove(p_shard_no, 'progress', array(
    select n.ctid from fairq.progress n
    where n.shard_no = p_shard_no
      and not exists (select from fairq._body(p_shard_no, n.task_id))
    limit p_limit
  ))
  + fairq._remove(p_shard_no, 'watches', array(
    select n.ctid from fairq.watches n where n.shard_no = p_shard_no and n.until < p_now limit p_limit
  ))
  + fairq._remove(p_shard_no, 'finished_tasks_default', array(
    select n.ctid from fairq.finished_tasks_default n where n.shard_no = p_shard_no and n.finished_at < v_oldest order by n.finished_at limit p_limit
  ))
  + fairq._remove(p_shard_no, 'attempts_default', array(
    select n.ctid from fairq.attempts_default n where n.shard_no = p_shard_no and n.ended_at < v_oldest order by n.ended_at limit p_limit
  ))
  + fairq._remove(p_shard_no, 'ledger', array(
    select l.ctid from fairq.ledger l where l.shard_no = p_shard_no and l.begins_at < v_oldest order by l.begins_at limit p_limit
  ))
  + fairq._remove(p_shard_no, 'ledger_queues', array(
    select l.ctid from fairq.ledger_queues l where l.shard_no = p_shard_no and l.begins_at < v_oldest order by l.begins_at limit p_limit
  ))
  + fairq._remove(p_shard_no, 'idempotency_keys', array(
    select n.ctid
    from fairq.idempotency_keys n
    join fairq.queues q on q.queue = n.queue
    where n.shard_no = p_shard_no and n.created_at >= v_floor and n.created_at < p_now - q.retention
      and not exists (select from fairq._body(p_shard_no, n.task_id))
      and not exists (select from fairq.finished_tasks f where f.shard_no = p_shard_no and f.id = n.task_id and f.finished_at >= p_now - q.retention)
      -- While groups move, a task may be in another shard than its key.
      and not exists (select from fairq.settings s where s.moving_from is not null)
    order by n.created_at limit p_limit for update of n skip locked
  ));
  perform fairq._raise_floor(p_shard_no, 'keys', p_now, pg_current_snapshot(), (
    select n.created_at from fairq.idempotency_keys n
    where n.shard_no = p_shard_no and n.created_at >= v_floor
    order by n.created_at limit 1
  ));
  return v_swept;
end;
$$;

-- Where the next sweep of a kind starts; null: at the beginning.
create function fairq._sweep_floor(p_shard_no integer, p_what text) returns bigint
language sql stable as $$
  select max(w.floor) from fairq.sweeps w where w.shard_no = p_shard_no and w.what = p_what
$$;

-- The same for a sweep by times. A floor in the future is from before the server's clock was set back: rows that came since may lie behind it, so the sweep
-- starts at the beginning again.
create function fairq._time_floor(p_shard_no integer, p_what text, p_now timestamptz) returns timestamptz
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_floor timestamptz := to_timestamp(fairq._sweep_floor(p_shard_no, p_what) / 1000000.0);
begin
  if greatest(v_floor, to_timestamp(fairq._sweep_floor(p_shard_no, p_what || ' next') / 1000000.0)) > p_now then
    delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what in (p_what, p_what || ' next', p_what || ' next xid');
    v_floor := null;
  end if;
  return coalesce(v_floor, '-infinity');
end;
$$;

-- Makes the sweeps by times start at the beginning again, because the server's clock was set back. Until it comes as far again, rows may come whose time lies
-- before the floors; when it has, or is set forward, no sweep would see that these have not passed them.
-- Locks: the floors, "skip locked": upkeep that is at work looks by itself, and the next call tries again.
create function fairq._forget_floors(p_shard_no integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  delete from fairq.sweeps w
  where w.shard_no = p_shard_no
    and w.ctid = any(array(
      select f.ctid from fairq.sweeps f
      where f.shard_no = p_shard_no
        and f.what = any(array['claims', 'claims next', 'claims next xid', 'expiry', 'keys', 'keys next', 'keys next xid', 'idle keys'])
      for update skip locked
    ));
end;
$$;

-- Notes how far a sweep by times has come. p_oldest is the time of the oldest row left, null: none is; p_snapshot is the snapshot in which it was seen. A row
-- may commit long after its time: so a time is noted together with the transactions that ran then, and the floor moves there when they have ended.
create function fairq._raise_floor(p_shard_no integer, p_what text, p_now timestamptz, p_snapshot pg_snapshot, p_oldest timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_next bigint := fairq._sweep_floor(p_shard_no, p_what || ' next');
  v_next_xid bigint := fairq._sweep_floor(p_shard_no, p_what || ' next xid');
begin
  if v_next_xid > pg_snapshot_xmax(p_snapshot)::text::bigint then
    -- From before a restore into another server: there is no transaction left to wait for.
    delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what = p_what || ' next xid';
    v_next_xid := null;
  end if;
  if v_next_xid is null or pg_snapshot_xmin(p_snapshot)::text::bigint >= v_next_xid then
    if v_next is not null then
      perform fairq._set_sweep_floor(p_shard_no, p_what, least(v_next, (extract(epoch from p_oldest) * 1000000)::bigint));
    end if;
    perform fairq._set_sweep_floor(p_shard_no, p_what || ' next', (extract(epoch from p_now - interval '1 minute') * 1000000)::bigint);
    perform fairq._set_sweep_floor(p_shard_no, p_what || ' next xid', pg_snapshot_xmax(p_snapshot)::text::bigint);
  end if;
end;
$$;

-- Notes how far a sweep has come.
create function fairq._set_sweep_floor(p_shard_no integer, p_what text, p_floor bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_previous bigint := fairq._sweep_floor(p_shard_no, p_what);
begin
  if p_floor is null or p_floor <= v_previous then return; end if;
  insert into fairq.sweeps (shard_no, what, floor) values (p_shard_no, p_what, p_floor);
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what = p_what and w.floor = v_previous;
end;
$$;
