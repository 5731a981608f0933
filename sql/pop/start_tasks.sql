-- Starts claimed tasks: prefetched ones, and those that are to run alone. It checks ownership, lease and deadline once more before any user code runs. A task
-- whose claim ran out or was taken over is missing in the answer; so is one whose deadline passed in the buffer, which ends as expired.
-- Returns the ids to run. Raises QF011 arrays of different length.
-- Locks: held, the rows named, in the order of their ctids.
create function fairq.start_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
  v_ctids tid[];
  v_expired tid[];
  v_ended bigint[];
  v_started integer;
begin
  perform fairq._check_lengths(array[coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0)]);
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    perform fairq._check_worker(v_shard_no, p_worker_id);
    -- Repeated for rows that somebody replaced between the look and the start.
    loop
      select array_agg(h.ctid) filter (where not b.is_expired and coalesce(h.lease_expires_at > v_now, true)), array_agg(h.ctid) filter (where b.is_expired)
      into v_ctids, v_expired
      from unnest(p_ids, p_attempts) as i(id, attempt)
      cross join lateral (
        select k.ctid, k.lease_expires_at from fairq.held k
        where k.shard_no = v_shard_no and k.id = i.id and k.attempt = i.attempt and k.worker_id = p_worker_id
          and k.started_at is null
        offset 0
      ) h
      cross join lateral (select coalesce(t.expires_at <= v_now, false) as is_expired from fairq._body(v_shard_no, i.id) t) b;
      -- Exactly the rows that were looked at: not another attempt of theirs, and none that somebody has started meanwhile.
      v_ended := case when v_expired is not null then array(
        select l.*
        from fairq._leave(v_shard_no, array(
          select t from unnest(fairq._find_held(v_shard_no, p_worker_id, p_ids, p_attempts, v_now, 'expired')) t where t.held = any(v_expired)
        ), v_now) l
      ) end;
      return query select s.* from fairq._start(v_shard_no, v_ctids, v_now) s;
      get diagnostics v_started = row_count;
      exit when v_started = coalesce(cardinality(v_ctids), 0) and cardinality(v_ended) is not distinct from cardinality(v_expired);
    end loop;
  end loop;
end;
$$;
comment on function fairq.start_tasks is 'Starts claimed tasks of a worker that prefetches. Returns the ids that it still holds.';

-- The rows are replaced, by ctid and no other way, see _leave.
create function fairq._start(p_shard_no integer, p_ctids tid[], p_now timestamptz) returns setof bigint
language plpgsql rows 100 set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
begin
  return query
    with claimed as (
      delete from fairq.held k where k.shard_no = p_shard_no and k.ctid = any(p_ctids) returning k.*
    )
    insert into fairq.held as h (shard_no, id, worker_id, attempt, started_at, charge, meters, counted, user_counted, keyed)
    select c.shard_no, c.id, c.worker_id, c.attempt, p_now, c.charge, c.meters, c.counted, c.user_counted, c.keyed from claimed c
    returning h.id;
end;
$$;
