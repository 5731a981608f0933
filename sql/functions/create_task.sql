-- Creates a task in the caller's transaction. Two inserts, the task and its ring: nothing shared is locked, updated or waited for, in any
-- isolation level (I2); only equal idempotency keys wait for each other.
-- p_promote assigns the block address at once. That takes the domain's lock until the transaction ends: for a transaction that ends here.
-- Returns the id of the task; with a known idempotency key, the id of the task that has it.
-- Raises QF001 to QF010 (see _check_task), QF003 unknown queue, QF005 p_promote outside READ COMMITTED, QF016 the queue is draining (a known
-- idempotency key is answered all the same).
create function fairq.create_task(
  p_group_key text,
  p_payload jsonb,
  p_queue text default 'default',
  p_kind text default 'default',
  p_priority integer default 0,
  p_run_at timestamptz default null,
  p_expires_at timestamptz default null,
  p_max_attempts integer default null,
  p_cost double precision default 1,
  p_timeout interval default null,
  p_idempotency_key text default null,
  p_concurrency_key text default null,
  p_headers jsonb default null,
  p_promote boolean default false
) returns bigint
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
  v_settings record;
  v_shard_no integer;
  v_id bigint;
  v_known_id bigint;
  v_scheduled boolean := coalesce(p_run_at > v_now, false);
  v_announce boolean := false;
begin
  select s.shard_count, s.payload_limit, q.max_attempts, q.notify, q.draining_at into v_settings
  from fairq.settings s
  cross join fairq.queues q
  where q.queue = p_queue
    and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  perform fairq._check_task(p_group_key, p_payload, v_settings.payload_limit, p_kind, p_priority, p_run_at, p_expires_at, p_max_attempts,
    p_cost, p_timeout, p_idempotency_key, p_concurrency_key);

  v_shard_no := fairq._shard_of(p_group_key, v_settings.shard_count);
  v_id := nextval('fairq.task_ids');
  if p_idempotency_key is not null then
    v_known_id := fairq._claim_idempotency_key(v_shard_no, p_queue, p_group_key, p_idempotency_key, p_kind, p_payload, v_id);
    if v_known_id is not null then
      return v_known_id;
    end if;
  end if;
  if v_settings.draining_at is not null then
    perform fairq._refuse_draining(p_queue);
  end if;

  if v_settings.notify then
    select not a.is_announced into v_announce from fairq._announced(v_shard_no, p_queue) a;
  end if;

  insert into fairq.tasks (shard_no, id, sequence, queue, group_key, kind, state, priority, created_at, run_at, expires_at, cost,
    max_attempts, timeout, idempotency_key, concurrency_key, headers, payload)
  values (v_shard_no, v_id, v_id, p_queue, p_group_key, p_kind, case when v_scheduled then 'scheduled' else 'overflow' end, p_priority,
    v_now, coalesce(p_run_at, v_now), p_expires_at, p_cost, coalesce(p_max_attempts, v_settings.max_attempts), p_timeout,
    p_idempotency_key, p_concurrency_key, p_headers, p_payload);

  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, due_at, keyed, announced)
  values (v_shard_no, p_queue, p_group_key, case when not v_scheduled then p_priority end, case when not v_scheduled then v_id end,
    case when v_scheduled then p_run_at end, p_concurrency_key is not null, v_announce);

  if p_promote then
    perform fairq._promote(v_shard_no, p_queue, 1000, true);
  end if;
  -- Also for a scheduled task: a worker that sleeps learns when to wake up.
  if v_announce then
    perform pg_notify('fairq', p_queue);
  end if;
  return v_id;
end;
$$;
comment on function fairq.create_task(text, jsonb, text, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text, jsonb, boolean) is
  'Creates a task in the caller''s transaction, without waiting for anyone. Returns its id.';
