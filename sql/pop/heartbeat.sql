-- A worker's sign of life. p_circuit_open and p_circuit_trips tell operators how its circuit breaker is doing; null: unchanged. A worker that knows which tasks
-- it runs should pass their ids (p_ids): then only these are looked up.
-- Returns those of its tasks that somebody asked to cancel, again and again until they are finished: stop them and finish them as cancelled.
-- Raises QF004 unknown worker: it counts as lost, and others may have its tasks. Locks: the worker's row, shared, and its heartbeats.
-- Cost: one step in held_pkey and one in cancellations_task_idx for each of p_ids; without them all open cancellations are read. It never reads all tasks of
-- the worker: under a held xmin these would be all it ever ran.
create function fairq.heartbeat(
  p_worker_id bigint, p_ids bigint[] default null, p_circuit_open boolean default null, p_circuit_trips integer default null
) returns setof bigint
language plpgsql security definer rows 1 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform fairq._touch_worker(v_shard_no, p_worker_id, v_now, true, p_circuit_open, p_circuit_trips);
    return query
      select t.id
      from unnest(coalesce(p_ids, array(select distinct c.task_id from fairq.cancellations c where c.shard_no = v_shard_no and not c.unless_held))) i(id)
      cross join lateral (
        select h.id from fairq.held h
        where h.shard_no = v_shard_no and h.id = i.id and h.worker_id = p_worker_id
          and exists (select from fairq.cancellations c where c.shard_no = v_shard_no and c.task_id = i.id and not c.unless_held offset 0)
        offset 0
      ) t;
  end loop;
end;
$$;
comment on function fairq.heartbeat is 'A worker''s sign of life. Returns those of its tasks that should be cancelled.';

-- Checks that a worker is known, and renews its heartbeat: at once (p_beats), else when a third of its lease is gone, because working is a sign of life. The
-- new heartbeat is inserted and the previous one deleted, so nobody walks through dead rows.
-- Raises QF004 unknown worker, or one whose tasks were taken from it; 42501 (see _check_worker).
-- Locks: when it beats, the worker's row, shared, and its heartbeats.
-- Cost: one entry of heartbeats_pkey, read backwards.
create function fairq._touch_worker(
  p_shard_no integer, p_worker_id bigint, p_now timestamptz, p_beats boolean default false, p_circuit_open boolean default null,
  p_circuit_trips integer default null
) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_lease interval;
  v_role text;
  v_previous timestamptz;
begin
  select w.lease, w.registered_by, (
      select h.beat_at from fairq.heartbeats h
      where h.shard_no = p_shard_no and h.worker_id = p_worker_id
      order by h.beat_at desc limit 1
    )
  into v_lease, v_role, v_previous
  from fairq.workers w
  where w.shard_no = p_shard_no and w.worker_id = p_worker_id and w.lost_at is null;
  if not found then perform fairq._refuse_worker(p_worker_id); end if;
  if v_role <> fairq._caller() then perform fairq._check_worker(p_shard_no, p_worker_id); end if;
  if v_previous between p_now - (case when p_beats then interval '0' else v_lease / 3 end) and p_now + interval '1 minute' then return; end if;
  -- The server's clock was set back, by more than the sweeps allow for. Upkeep may come only after it has caught up.
  if v_previous > p_now then perform fairq._forget_floors(p_shard_no); end if;
  -- The worker's row first, in the order of those who retire it or give it up. Otherwise the pop that follows would wait for them, and they for its heartbeat.
  perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id and w.lost_at is null for key share;
  if not found then perform fairq._refuse_worker(p_worker_id); end if;
  insert into fairq.heartbeats (shard_no, worker_id, beat_at, circuit_open, circuit_trips)
  select p_shard_no, p_worker_id, p_now, coalesce(p_circuit_open, b.circuit_open, false), coalesce(p_circuit_trips, b.circuit_trips, 0)
  from (values (v_previous)) p(beat_at)
  left join fairq.heartbeats b on b.shard_no = p_shard_no and b.worker_id = p_worker_id and b.beat_at = p.beat_at
  on conflict do nothing;
  -- Another session that renews it right now has locked that row and will delete it. Nobody waits here, because a pop goes through the shards in an order of
  -- its own.
  perform from fairq.heartbeats h where h.shard_no = p_shard_no and h.worker_id = p_worker_id and h.beat_at = v_previous for update skip locked;
  if found then
    delete from fairq.heartbeats h where h.shard_no = p_shard_no and h.worker_id = p_worker_id and h.beat_at = v_previous;
  end if;
end;
$$;

-- Raises QF004: the worker is unknown, or was given up.
create function fairq._refuse_worker(p_worker_id bigint) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'there is no worker %', coalesce(p_worker_id::text, 'null')
    using errcode = 'QF004',
      hint = 'It was retired, or it is lost: it gave no sign of life for its lease. Register again: select fairq.register_worker(...);';
end;
$$;
