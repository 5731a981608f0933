-- Keeps the house: takes tasks from lost workers, gives up claims whose lease ran out, ends what expired, promotes what is due, sweeps, turns the
-- history's pages. Safe to call from anywhere and as often as one likes: one runs at a time per shard, the others return at once.
-- Returns what it did, by name; an empty object when another one was at it.
-- Raises QF005 outside READ COMMITTED.
-- Locks: maintenance, one row per shard; then as the parts say. Bounded by p_limit rows of a kind, so a call is short; call it every few seconds.
create function fairq.maintain(p_limit integer default 10000) returns jsonb
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
  v_worker_id bigint;
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_recovered integer := 0;
  v_unclaimed integer := 0;
  v_expired integer := 0;
  v_promoted integer := 0;
  v_swept integer := 0;
  v_partitions integer := 0;
  v_mine boolean := false;
begin
  perform fairq._check_limit(p_limit);
  for v_shard_no in
    select m.shard_no from fairq.maintenance m order by m.shard_no for update skip locked
  loop
    for v_worker_id in
      select w.worker_id
      from fairq.workers w
      where w.shard_no = v_shard_no
        -- While the server was down nobody could give a sign of life.
        and v_now > w.lease + greatest(pg_postmaster_start_time(), w.registered_at, (
          select h.beat_at
          from fairq.heartbeats h
          where h.shard_no = v_shard_no
            and h.worker_id = w.worker_id
          order by h.beat_at desc
          limit 1
        ))
      order by w.worker_id
    loop
      v_recovered := v_recovered + fairq._recover_worker(v_shard_no, v_worker_id, p_limit, v_now);
    end loop;

    v_unclaimed := v_unclaimed + fairq._give_up_claims(v_shard_no, p_limit, v_now);
    v_expired := v_expired + fairq._expire_waiting(v_shard_no, p_limit, v_now);

    for v_queue in select q.* from fairq.queues q order by q.queue loop
      select k.* into v_tick from fairq._tick(v_shard_no, v_queue.queue) k;
      -- Keys and meters that nobody has used have no tick yet, and need none.
      continue when v_queue.internal and v_tick.tick is null;
      if v_tick.tick is null or fairq._has_news(v_tick) then
        v_promoted := v_promoted + coalesce(
          fairq._promote(v_shard_no, v_queue.queue, fairq._ready_target(v_shard_no, v_queue), false), 0);
      end if;
      if fairq._lock_domain(v_shard_no, v_queue.queue, false) then
        v_swept := v_swept + fairq._sweep_domain(v_shard_no, v_queue.queue, p_limit);
      end if;
      if v_promoted > 0 and v_queue.notify and not v_queue.internal then
        perform pg_notify('fairq', v_queue.queue);
      end if;
    end loop;

    v_swept := v_swept + fairq._sweep_keys(v_shard_no, p_limit, v_now);
    v_mine := true;
  end loop;
  -- Last, because it locks the default partitions, where a new installation's finishes go, until the transaction ends.
  if v_mine then
    v_partitions := fairq._rotate_partitions();
  end if;

  return jsonb_strip_nulls(jsonb_build_object(
    'recovered', nullif(v_recovered, 0), 'unclaimed', nullif(v_unclaimed, 0), 'expired', nullif(v_expired, 0),
    'promoted', nullif(v_promoted, 0), 'swept', nullif(v_swept, 0), 'partitions', nullif(v_partitions, 0)));
end;
$$;
comment on function fairq.maintain(integer) is
  'Lost workers, expired claims and tasks, due schedules, sweeps, partitions. Call it every few seconds from anywhere.';
