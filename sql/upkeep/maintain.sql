-- Upkeep: takes tasks from lost workers, gives up claims whose lease ran out, ends expired tasks, fires schedules, promotes what is due, sweeps, makes and
-- drops partitions, and writes the ledger. Call it from anywhere, as often as you like: one call works in a shard at a time, others skip that shard.
-- Each part can fail alone: a failed part is rolled back, and noted in fairq.upkeep_failures until it succeeds; the others go on. Call the parts one by one,
-- each in a transaction of its own (p_part, see upkeep_parts), if you can: then no part holds locks of another.
-- Returns what it did, by name; an empty object when other calls are at work.
-- Raises QF005 outside READ COMMITTED, QF014 unknown part.
-- Locks: maintenance, one row per shard; then as the parts say. Handles at most p_limit rows of a kind, so a call is short; call it every few seconds.
create function fairq.maintain(p_limit integer default 10000, p_part text default null) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
  v_part text;
  v_did jsonb;
  v_done jsonb := jsonb_build_object();
begin
  perform fairq._check_limit(p_limit);
  perform fairq._check_isolation('upkeep');
  if p_part is not null and not exists (select from fairq.upkeep_parts() u(part) where u.part = p_part) then
    raise exception 'upkeep has no part "%"', left(p_part, 60) using errcode = 'QF014', hint = 'See: select fairq.upkeep_parts();';
  end if;
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform from fairq.maintenance m where m.shard_no = v_shard_no for update skip locked;
    continue when not found;
    for v_part in select u.part from fairq.upkeep_parts() u(part) where p_part is null or u.part = p_part loop
      begin
        v_did := fairq._upkeep(v_shard_no, v_part, p_limit);
        delete from fairq.upkeep_failures f where f.shard_no = v_shard_no and f.part = v_part;
        select coalesce(jsonb_object_agg(k.name, coalesce((v_done ->> k.name)::bigint, 0) + coalesce((v_did ->> k.name)::bigint, 0)), v_done) into v_done
        from (select jsonb_object_keys(v_done) union select d.key from jsonb_each_text(v_did) d where d.value::bigint > 0) k(name);
      exception when others then
        insert into fairq.upkeep_failures as f (shard_no, part, failed_since, failed_at, message)
        values (v_shard_no, v_part, fairq._now(), fairq._now(), format('%s (%s)', sqlerrm, sqlstate))
        on conflict (shard_no, part) do update
        set failed_at = excluded.failed_at, message = excluded.message;
        v_done := v_done || jsonb_build_object('failed', coalesce((v_done ->> 'failed')::bigint, 0) + 1);
      end;
    end loop;
  end loop;
  return v_done;
end;
$$;
comment on function fairq.maintain is
  'Recovers from lost workers, ends expired tasks, fires schedules, promotes what is due, sweeps, keeps partitions. Call it every few seconds from anywhere.';

-- The parts of upkeep, in the order in which they matter.
create function fairq.upkeep_parts() returns setof text
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select unnest(array['recovery', 'expiry', 'schedules'] || array(select 'queue ' || q.queue from fairq.queues q order by q.queue)
    || array['notes', 'partitions', 'ledger'])
$$;
comment on function fairq.upkeep_parts is 'The parts of fairq.maintain(), in order.';

-- One part of upkeep in one shard. Returns what it did, by name.
create function fairq._upkeep(p_shard_no integer, p_part text, p_limit integer) returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_now timestamptz := fairq._now();
begin
  case
    when p_part = 'recovery' then
      perform fairq._set_heartbeats_back(p_shard_no, v_now);
      return jsonb_build_object('recovered', (
          select sum(fairq._recover_worker(p_shard_no, s.worker_id, p_limit, v_now)) from fairq._silent_workers(p_shard_no, v_now) s(worker_id)),
        'unclaimed', fairq._give_up_claims(p_shard_no, p_limit, v_now));
    when p_part = 'expiry' then
      return jsonb_build_object('expired', fairq._expire_waiting(p_shard_no, p_limit, v_now));
    when p_part = 'schedules' then
      return jsonb_build_object('fired', cardinality(fairq._fire_due(p_shard_no, least(p_limit, 500), v_now)));
    when p_part = 'notes' then
      return jsonb_build_object('swept', fairq._sweep_notes(p_shard_no, p_limit, v_now));
    when p_part = 'partitions' then
      return jsonb_build_object('partitions', case when p_shard_no = 0 then fairq._rotate_partitions() end);
    when p_part = 'ledger' then
      return jsonb_build_object('parts', fairq._keep_ledger(p_shard_no, v_now));
    else
      return (select fairq._keep_queue(p_shard_no, q, p_limit) from fairq.queues q where 'queue ' || q.queue = p_part);
  end case;
end;
$$;

-- Promotes a queue that has news, and sweeps what promotion left behind. Does not wait while another session promotes. The queue's meter comes first, as in the
-- lock order.
create function fairq._keep_queue(p_shard_no integer, p_queue fairq.queues, p_limit integer) returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_promoted integer := 0;
  v_swept integer := 0;
begin
  if p_shard_no = 0 and p_queue.queue <> '#keys' then
    v_swept := fairq._keep_meter(case p_queue.queue when '#cluster' then 'cluster' else 'queue ' || p_queue.queue end, p_limit);
  end if;
  if p_queue.queue = '#cluster' or not fairq._lock_domain(p_shard_no, p_queue.queue, false) then
    return jsonb_build_object('swept', v_swept);
  end if;
  perform fairq._free_unused_keys(p_shard_no, p_queue, fairq._now());
  if p_queue.queue = '#keys' then
    perform fairq._open_keys(p_shard_no, fairq._now());
  elsif not exists (select from fairq._tick(p_shard_no, p_queue.queue) k where not fairq._has_news(k)) then
    v_promoted := (fairq._promote(p_shard_no, p_queue.queue, fairq._ready_target(p_shard_no, p_queue), false)).o_promoted;
    -- Tasks with a key or a rate wait for the pop that takes them.
    perform pg_notify('fairq', p_queue.queue) from fairq._tick(p_shard_no, p_queue.queue) k where p_queue.notify and (v_promoted > 0 or k.horizon is not null);
  end if;
  -- No pop promotes a paused queue, so one of its tasks would keep a key that it was granted.
  if p_queue.paused_at is not null and fairq._lock_domain(p_shard_no, '#keys', false) then
    perform fairq._take_keys_back(p_shard_no, p_queue.queue, fairq._now());
  end if;
  return jsonb_build_object('promoted', v_promoted, 'swept', v_swept + fairq._sweep_domain(p_shard_no, p_queue.queue, p_limit));
end;
$$;

-- Recalls groups that have a ready task with a place of a key, if the queue is paused, or if nobody popped the task for ten seconds while others wait for the
-- key. For the next ten seconds the queue is granted no places of keys; otherwise each of its groups would have its turn first.
-- Locks: none; the caller holds the domain. Cost: the ready set, where tasks have keys.
create function fairq._free_unused_keys(p_shard_no integer, p_queue fairq.queues, p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, configured)
  select distinct r.shard_no, r.queue, r.group_key, true
  from fairq._tick(p_shard_no, p_queue.queue) k
  -- Lateral, so that the scan begins at the clock: a join could begin with dead rows of what was popped long ago.
  cross join lateral (
    select y.* from fairq.ready y
    where y.shard_no = p_shard_no and y.queue = p_queue.queue and y.position >= 0 and (y.block, y.position) >= (k.clock, k.clock_position)
    offset 0
  ) r
  cross join lateral fairq._body(p_shard_no, r.id) b
  where k.keyed and r.keyed_at is not null
    and (p_queue.paused_at is not null or r.keyed_at <= p_now - interval '10 seconds' and exists (
      select from fairq.parked w
      where w.shard_no = p_shard_no and w.concurrency_key = b.concurrency_key and w.turn is not null
        and (w.queue, w.group_key) <> (r.queue, r.group_key)
    ));
  if found then
    perform fairq._set_sweep_floor(p_shard_no, 'unused keys ' || p_queue.queue, (extract(epoch from p_now) * 1000000)::bigint);
  end if;
end;
$$;

-- Lets a meter hear its rings, and sweeps what it left behind. Most queues have no meter. Transactions that began before its limits changed may still commit
-- tasks popped without asking it, so held tasks are counted until all of them have ended: those older than the second upkeep after the change. The noted value
-- is 0: no upkeep has seen the change; 1: one has; else the transaction of the second.
create function fairq._keep_meter(p_scope text, p_limit integer) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_changed bigint;
  v_is_over boolean;
begin
  if not exists (select from fairq.domains d where d.shard_no = 0 and d.queue = '#' || p_scope) or not fairq._lock_domain(0, '#' || p_scope, false) then
    return 0;
  end if;
  v_changed := fairq._sweep_floor(0, 'count held #' || p_scope);
  -- Asked before the tasks are counted. An id that this server has not given out yet is from before a restore: there is no transaction left to wait for.
  v_is_over := v_changed > 1 and not v_changed::text::xid8 between pg_snapshot_xmin(pg_current_snapshot()) and pg_snapshot_xmax(pg_current_snapshot());
  if v_changed is not null then
    perform fairq._count_held(p_scope);
  end if;
  if v_is_over then
    delete from fairq.sweeps w where w.shard_no = 0 and w.what = 'count held #' || p_scope and w.floor = v_changed;
  elsif v_changed < 2 then
    perform fairq._set_sweep_floor(0, 'count held #' || p_scope, case v_changed when 0 then 1 else pg_current_xact_id()::text::bigint end);
  end if;
  perform fairq._settle_meter(p_scope, fairq._now());
  return fairq._sweep_domain(0, '#' || p_scope, p_limit);
end;
$$;
