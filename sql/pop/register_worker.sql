-- Registers a worker. It is alive until it is retired, or gives no sign of life (heartbeat, pop) for p_lease.
-- p_kinds: the kinds it knows, each with the most attempts it allows or null: {"parse": 3, "mail": null}. At this worker no task of such a kind has more
-- attempts than that.
-- Returns its id, which every later call names.
-- Raises QF003 unknown queue, 42501 a queue for other roles, QF007 bad slots, QF009 bad lease, QF006 bad name, QF014 bad kinds.
create function fairq.register_worker(p_name text, p_queues text[], p_slots integer, p_lease interval default '1 minute', p_kinds jsonb default null)
returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_worker_id bigint := nextval('fairq.worker_ids');
begin
  perform fairq._check_name('the name of the worker', p_name, 200, 'QF006', 'For example the host name and the process id');
  perform fairq._check_limit(p_slots, format('the number of slots of worker "%s"', p_name));
  -- A lease that cannot be added to a time would make every later maintain() fail, for all workers.
  perform fairq._check_length(format('the lease of worker "%s"', p_name), coalesce(p_lease, interval '0'), interval '366 days');
  if coalesce(cardinality(p_queues), 0) = 0 then
    raise exception 'worker "%" names no queue', p_name using errcode = 'QF003', hint = 'For example: array[''default''].';
  end if;
  if jsonb_typeof(p_kinds) <> 'object' or exists (
    select
    from jsonb_each(case jsonb_typeof(p_kinds) when 'object' then p_kinds end) k
    where k.value <> 'null' and k.value::text !~ '^[1-9][0-9]{0,6}$'
  ) then
    raise exception 'the kinds of worker "%" are %', p_name, left(p_kinds::text, 60)
      using errcode = 'QF014', hint = 'Names, each with the most attempts or null: {"parse": 3, "mail": null}.';
  end if;
  perform fairq._check_role(q.queue, q.work_role) from unnest(p_queues) n(name) cross join lateral fairq._queue(n.name) q where q.work_role is not null;

  insert into fairq.workers (shard_no, worker_id, name, registered_by, queues, kinds, slots, lease, registered_at)
  select s.shard_no, v_worker_id, p_name, fairq._caller(), p_queues, p_kinds, p_slots, p_lease, v_now
  from fairq._shards(null) s(shard_no);
  insert into fairq.heartbeats (shard_no, worker_id, beat_at)
  select s.shard_no, v_worker_id, v_now from fairq._shards(null) s(shard_no);
  if p_kinds is not null then
    perform fairq._wake_declined(s.shard_no, q.queue, p_kinds, v_now)
    from fairq._shards(null) s(shard_no)
    cross join unnest(p_queues) q(queue);
  end if;
  return v_worker_id;
end;
$$;
comment on function fairq.register_worker is 'Registers a worker and returns its id.';

-- Tasks that others declined, and whose kind this worker knows, are due at once: they were waiting for such a worker.
-- Bodies are locked "skip locked". Wishes to cancel them are rung again: whoever heard one a moment ago found the body locked.
-- Cost: what comes due within the longest such pause, at most 10,000 entries of tasks_due_idx.
create function fairq._wake_declined(p_shard_no integer, p_queue text, p_kinds jsonb, p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_ids bigint[] := array(
    select t.id
    from (
      select w.id, w.kind, w.attempt, w.spared from fairq.tasks w
      where w.shard_no = p_shard_no and w.queue = p_queue and w.scheduled and w.run_at > p_now and w.run_at <= p_now + interval '375 seconds'
      order by w.run_at limit 10000
    ) t
    where t.spared > 0 and p_kinds ? t.kind
      and exists (
        select from fairq.attempts a where a.shard_no = p_shard_no and a.task_id = t.id and a.attempt = t.attempt and a.outcome = 'declined' offset 0
      )
  );
begin
  if v_ids = '{}' then return; end if;
  update fairq.tasks t
  set run_at = p_now
  where t.shard_no = p_shard_no and t.id in (select l.id from fairq.tasks l where l.shard_no = p_shard_no and l.id = any(v_ids) and l.scheduled for update skip locked);
  perform fairq._announce(p_shard_no, v_ids);
end;
$$;
