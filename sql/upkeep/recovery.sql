-- Gives up a worker that gave no sign of life for its lease, and puts its tasks back in line, at most p_limit of them. The loss of a running task is noted in
-- fairq.attempts and counted apart from failures, see _find_held. A claimed task that never started does not count as lost.
-- From now on every call of the worker is refused, so it learns of its loss with the next one. Its row goes once it holds no task.
-- Returns how many tasks it took from the worker.
-- Locks: the worker's row, then held, both "skip locked": a worker that is popping right now is alive, and so is one that beat since we looked.
-- Cost: all held tasks of the shard.
create function fairq._recover_worker(p_shard_no integer, p_worker_id bigint, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_held bigint[];
begin
  perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id for update skip locked;
  if not found or not exists (select from fairq._silent_workers(p_shard_no, p_now) s(worker_id) where s.worker_id = p_worker_id) then
    return 0;
  end if;
  update fairq.workers w set lost_at = p_now where w.shard_no = p_shard_no and w.worker_id = p_worker_id and w.lost_at is null;
  v_held := array(
    select h.id from fairq.held h where h.shard_no = p_shard_no and h.worker_id = p_worker_id limit p_limit for update skip locked
  );
  perform fairq._leave(p_shard_no, fairq._find_held(p_shard_no, p_worker_id, v_held, null, p_now, 'worker_lost',
    jsonb_build_object('code', 'worker_lost', 'message', format('worker %s gave no sign of life', p_worker_id))), p_now);
  if not exists (select from fairq.held h where h.shard_no = p_shard_no and h.worker_id = p_worker_id) then
    delete from fairq.heartbeats h where h.shard_no = p_shard_no and h.worker_id = p_worker_id;
    delete from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id;
  end if;
  return cardinality(v_held);
end;
$$;

-- After the server's clock was set back: signs of life from the future count as if they were given now. Otherwise what a dead worker holds would stay with it
-- until that time comes, and its lease after it.
-- Locks: heartbeats, "skip locked". Cost: one step for each worker.
create function fairq._set_heartbeats_back(p_shard_no integer, p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  with ahead as (
    delete from fairq.heartbeats h
    where h.shard_no = p_shard_no
      and h.ctid = any(array(
        select b.ctid
        from fairq.workers w
        cross join lateral (
          select k.ctid from fairq.heartbeats k
          where k.shard_no = p_shard_no and k.worker_id = w.worker_id and k.beat_at > p_now + interval '1 minute'
          for update skip locked
        ) b
        where w.shard_no = p_shard_no
      ))
    returning h.worker_id, h.circuit_open, h.circuit_trips
  )
  insert into fairq.heartbeats (shard_no, worker_id, beat_at, circuit_open, circuit_trips)
  select distinct on (a.worker_id) p_shard_no, a.worker_id, p_now, a.circuit_open, a.circuit_trips from ahead a
  on conflict do nothing;
  if found then perform fairq._forget_floors(p_shard_no); end if;
end;
$$;

-- Workers without a sign of life for their lease. While the server was down no worker could give one, so they get some time after its start.
create function fairq._silent_workers(p_shard_no integer, p_now timestamptz) returns setof bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  return query
    select w.worker_id from fairq.workers w
    where w.shard_no = p_shard_no
      and (w.lost_at is not null
        or p_now > greatest(
          -- Null where the clock was set back since.
          case when pg_postmaster_start_time() <= p_now then pg_postmaster_start_time() + least(w.lease, interval '20 seconds') end,
          case when w.registered_at <= p_now then w.registered_at + w.lease end, w.lease + (
          select h.beat_at from fairq.heartbeats h
          where h.shard_no = p_shard_no and h.worker_id = w.worker_id
          order by h.beat_at desc limit 1
        )))
    order by w.worker_id;
end;
$$;

-- Puts claims whose lease ran out back in line, at most p_limit. They lose no attempt, for none began. The sweep starts where the last one ended, not at the
-- dead entries of all claims ever made. It does not pass a locked claim, which is being started or ended right now.
-- Returns how many it gave up. Locks: held, "skip locked". Cost: held_claim_lease_idx from the floor to now.
create function fairq._give_up_claims(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = pg_catalog, pg_temp set enable_sort = off as $$
declare
  v_floor timestamptz := fairq._time_floor(p_shard_no, 'claims', p_now);
  v_claims record;
  v_given_up integer := 0;
begin
  for v_claims in
    select h.worker_id, array_agg(h.id) as ids
    from (
      select k.id, k.worker_id from fairq.held k
      where k.shard_no = p_shard_no and k.lease_expires_at >= v_floor and k.lease_expires_at <= p_now
      order by k.lease_expires_at limit p_limit for update skip locked
    ) h
    group by h.worker_id
  loop
    perform fairq._leave(p_shard_no, fairq._find_held(p_shard_no, v_claims.worker_id, v_claims.ids, null, p_now, 'lease_expired'), p_now);
    v_given_up := v_given_up + cardinality(v_claims.ids);
  end loop;

  perform fairq._raise_floor(p_shard_no, 'claims', p_now, pg_current_snapshot(), (
    select k.lease_expires_at from fairq.held k
    where k.shard_no = p_shard_no and k.lease_expires_at >= v_floor and k.lease_expires_at <= p_now
    order by k.lease_expires_at limit 1
  ));
  return v_given_up;
end;
$$;
