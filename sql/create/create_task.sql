-- Creates a task in the caller's transaction with two inserts, the task and its ring. Nothing shared is locked, updated or waited for, in any isolation level
-- (I2). Only equal idempotency keys wait for each other.
-- Returns the id of the task, or, if the idempotency key is known, the id of the task that has it. With p_unique = 'waiting' a new task is created all the
-- same, and the one that has the key makes room for it if it still waits: its id is not returned, because it may begin before this transaction commits and
-- would see nothing of it.
-- Raises QF001 to QF010 (see _check_task), QF003 unknown queue, 42501 the queue is for another role, QF016 the queue is draining (a known idempotency key is
-- still answered).
create function fairq.create_task(
  p_group_key text, p_payload jsonb, p_queue text default 'default', p_kind text default 'default', p_priority integer default null,
  p_run_at timestamptz default null, p_expires_at timestamptz default null, p_max_attempts integer default null, p_cost double precision default null,
  p_timeout interval default null, p_idempotency_key text default null, p_concurrency_key text default null, p_headers jsonb default null,
  p_unique text default null,
  p_user_key text default null
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_settings record;
  v_shard_no integer;
  v_id bigint;
  v_known_id bigint;
  v_scheduled boolean := coalesce(p_run_at > v_now, false);
  v_announce boolean := false;
begin
  select o.* into v_settings from fairq._options(p_queue, p_kind, p_max_attempts, p_priority, p_cost, p_timeout) o;
  if not found then perform fairq._queue(p_queue); end if;
  if v_settings.enqueue_role is not null then
    perform fairq._check_role(p_queue, v_settings.enqueue_role);
  end if;
  if fairq._is_odd(p_group_key, p_payload, v_settings.payload_limit, v_settings.priority, v_settings.cost, p_idempotency_key, p_concurrency_key, p_user_key)
    or p_kind is null or p_kind = '' or octet_length(p_kind) > 200
    or num_nonnulls(p_run_at, p_expires_at, p_max_attempts, p_timeout, p_headers) > 0
  then
    perform fairq._check_task(p_group_key, p_payload, v_settings.payload_limit, p_kind, v_settings.priority, p_run_at, p_expires_at, p_max_attempts,
      v_settings.cost, p_timeout, p_idempotency_key, p_concurrency_key, p_headers, p_user_key);
  end if;

  v_shard_no := case when v_settings.moving_from is null then fairq._shard_of(p_group_key, v_settings.shard_count) else fairq._home(p_group_key) end;
  v_id := nextval('fairq.task_ids');
  if p_unique is not null or p_idempotency_key is not null then
    v_known_id := fairq._take_idempotency_key(
      case when v_settings.moving_from is null then array[v_shard_no] else fairq._key_homes(p_group_key) end,
      p_queue, p_group_key, p_idempotency_key, p_unique, p_kind, p_payload, v_id);
    if v_known_id is not null then return v_known_id; end if;
  end if;
  if v_settings.draining_at is not null then perform fairq._refuse_draining(p_queue); end if;

  if v_settings.notify then
    select not a.is_announced into v_announce from fairq._announced(v_shard_no, p_queue) a;
  end if;

  insert into fairq.tasks (shard_no, id, sequence, queue, group_key, user_key, kind, priority, created_at, run_at, expires_at, cost,
    max_attempts, timeout, idempotency_key, concurrency_key, scheduled, headers, payload)
  values (v_shard_no, v_id, v_id, p_queue, p_group_key, coalesce(p_user_key, ''), p_kind, v_settings.priority,
    v_now, p_run_at, p_expires_at, v_settings.cost, v_settings.max_attempts, v_settings.timeout,
    p_idempotency_key, p_concurrency_key, v_scheduled, p_headers, p_payload);

  insert into fairq.rings (shard_no, queue, group_key, user_key, priority, sequence, due_at, keyed, announced)
  values (v_shard_no, p_queue, p_group_key, p_user_key, case when not v_scheduled then v_settings.priority end, case when not v_scheduled then v_id end,
    case when v_scheduled then p_run_at end, p_concurrency_key is not null, v_announce);

  -- A scheduled task is announced as well: a worker that sleeps learns when to wake up.
  if v_announce then perform pg_notify('fairq', p_queue); end if;
  return v_id;
end;
$$;
comment on function fairq.create_task is 'Creates a task in the caller''s transaction, without waiting for anyone. Returns its id.';

-- The settings of a new task: its creator's, else its kind's, else its queue's. The max_attempts of a kind is also an upper limit.
-- No row: there is no such queue. Without "set search_path", so that it is inlined into the statement that asks.
create function fairq._options(p_queue text, p_kind text, p_max_attempts integer, p_priority integer, p_cost double precision, p_timeout interval)
returns table (
  shard_count integer, moving_from integer, payload_limit integer, notify boolean, draining_at timestamptz, enqueue_role text, max_attempts integer, priority integer,
  cost double precision, timeout interval
)
language sql stable rows 1 as $$
  select s.shard_count, s.moving_from, s.payload_limit, q.notify, q.draining_at, q.enqueue_role, coalesce(least(p_max_attempts, k.max_attempts), q.max_attempts),
    coalesce(p_priority, k.priority, 0), coalesce(p_cost, k.cost, 1), coalesce(p_timeout, k.timeout)
  from fairq.settings s
  cross join fairq.queues q
  left join fairq.kinds k on k.queue = q.queue and k.kind = p_kind
  where q.queue = p_queue and not q.internal
$$;

-- Whether _check_task should look at a task. Without "set search_path", so that it is inlined: the many tasks that are in order cost no call.
create function fairq._is_odd(
  p_group_key text, p_payload jsonb, p_payload_limit integer, p_priority integer, p_cost double precision, p_idempotency_key text, p_concurrency_key text,
  p_user_key text
) returns boolean
language sql stable as $$
  select p_group_key is null or p_group_key = '' or octet_length(p_group_key) > 500
    or p_payload is null or fairq._is_large(p_payload, p_payload_limit)
    or p_priority not between -1000000 and 1000000
    or p_cost not between 0.001 and 1000000
    or p_idempotency_key = '' or octet_length(p_idempotency_key) > 500
    or p_concurrency_key = '' or octet_length(p_concurrency_key) > 500
    or p_user_key = '' or octet_length(p_user_key) > 500
$$;

-- Refuses a task that is not in order, with a clear message, before anything is written.
-- Raises QF001 group key, QF002 payload, QF006 other keys, QF007 priority and attempts, QF008 cost, QF009 times.
create function fairq._check_task(
  p_group_key text, p_payload jsonb, p_payload_limit integer, p_kind text, p_priority integer, p_run_at timestamptz, p_expires_at timestamptz,
  p_max_attempts integer, p_cost double precision, p_timeout interval, p_idempotency_key text, p_concurrency_key text, p_headers jsonb,
  p_user_key text default null
) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  -- The code, the part that is wrong, what is wrong with it, and what to do. Times must be valid in every time zone. Timeouts are bounded because workers keep
  -- them in types of limited range: one task that no worker can read would stop them all.
  v_wrong text[] := case
    when p_group_key is null or p_group_key = '' or octet_length(p_group_key) > 500
      then array['QF001']
    when p_payload is null
      then array['QF002', 'the payload', 'is null', 'Pass ''{}'' or ''null''::jsonb for a task without data.']
    when fairq._is_large(p_payload, p_payload_limit) and fairq._is_longer(p_payload, p_payload_limit)
      then array['QF002', 'the payload', format('has more than %s bytes', p_payload_limit),
        'Store the data elsewhere and pass a reference, or raise the limit: select fairq.configure_cluster(''{"payload_limit": ...}'');']
    when fairq._is_large(p_headers, p_payload_limit) and fairq._is_longer(p_headers, p_payload_limit)
      then array['QF002', 'the headers', format('have more than %s bytes', p_payload_limit),
        'Headers say how to treat a task; data belongs in the payload or elsewhere.']
    when p_kind is null or p_kind = '' or octet_length(p_kind) > 200
      then array['QF006', 'the kind', 'is null, empty or too long', 'Name the handler: a text of 1 to 200 bytes.']
    when p_user_key = '' or octet_length(p_user_key) > 500
      then array['QF006', 'the user key', 'is empty or too long', 'Name one of the users of the group: a text of 1 to 500 bytes; null names nobody.']
    when p_idempotency_key = '' or octet_length(p_idempotency_key) > 500 or p_concurrency_key = '' or octet_length(p_concurrency_key) > 500
      then array['QF006', 'the idempotency or concurrency key', 'is empty or too long', 'Keys have 1 to 500 bytes; null means none.']
    when p_priority is null or p_priority not between -1000000 and 1000000
      then array['QF007', 'the priority ' || coalesce(p_priority::text, 'null'), 'is out of range',
        'Higher runs first; the range is -1000000 to 1000000, the default 0.']
    when p_max_attempts not between 1 and 1000000
      then array['QF007', 'max_attempts ' || p_max_attempts, 'is out of range', 'At least 1; null uses the queue''s default.']
    when p_cost is null or p_cost not between 0.001 and 1000000
      then array['QF008', 'the cost ' || coalesce(p_cost::text, 'null'), 'is out of range',
        'The cost is relative to an ordinary task of cost 1: 0.001 to 1000000.']
    when p_run_at not between '0001-01-02 00:00+00' and '9999-12-31 00:00+00' or p_expires_at not between '0001-01-02 00:00+00' and '9999-12-31 00:00+00'
      then array['QF009', 'run_at or expires_at', 'is out of range', 'A time in the years 1 to 9999; leave it null for none.']
    when p_timeout <= interval '0' or not fairq._is_span(p_timeout, interval '1000000000 seconds')
      then array['QF009', 'the timeout ' || p_timeout, 'is out of range', 'More than 0, at most 1000000000 seconds; null for no limit.']
  end;
begin
  if v_wrong[1] = 'QF001' then
    perform fairq._check_name('the group key', p_group_key, 500, 'QF001', 'Name the tenant the task belongs to');
  elsif v_wrong is not null then
    raise exception '% of a task of group "%" %', v_wrong[2], p_group_key, v_wrong[3] using errcode = v_wrong[1], hint = v_wrong[4];
  end if;
end;
$$;

-- Whether JSON may be so large that its text has to be measured, which costs 2 us a KB. A number of twelve bytes can have 131,000 digits, so JSON that is not
-- measured has at most 22 MB of text. Without this bound a text of a gigabyte could get in, and every pop would fail. "#>" unpacks what a table had compressed.
-- Stable, as pg_column_size is, and without "set search_path", so that it is inlined: that saves 4 us a task.
create function fairq._is_large(p_json jsonb, p_most integer) returns boolean
language sql stable as $$ select pg_column_size(p_json #> '{}') > least(2048, p_most / 4) $$;

-- Whether the text of JSON is longer than p_most bytes, or longer than the server can make.
create function fairq._is_longer(p_json jsonb, p_most integer) returns boolean
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  return octet_length(p_json::text) > p_most;
exception when program_limit_exceeded or out_of_memory then
  return true;
end;
$$;

-- Takes an idempotency key for a task, unless another task has it. Here, and only here, creators wait: for another transaction that takes the same key.
-- With p_unique the key is taken away from the task that has it. That task ends as cancelled unless it has begun: at the next promotion, or when it comes back.
-- Returns the id of the task that already has the key, or null: the key is ours.
-- Raises QF010 when that task has another payload or kind (not with p_any), QF006 when p_unique is not 'waiting' or comes without a key; in REPEATABLE READ and
-- above the usual 40001 when the other task came after the snapshot.
-- p_shard_nos: where the key is taken, one after the other. While groups move these are the old and the new place of its group, see _key_homes.
-- Locks: idempotency_keys, one row in each.
create function fairq._take_idempotency_key(
  p_shard_nos integer[], p_queue text, p_group_key text, p_idempotency_key text, p_unique text, p_kind text, p_payload jsonb, p_id bigint,
  p_any boolean default false
) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  -- Says what the task does.
  v_fingerprint text := md5(p_kind || ' ' || p_payload::text);
  v_known_id bigint;
  v_known_fingerprint text;
  v_shard_no integer;
begin
  if p_unique <> 'waiting' or p_idempotency_key is null then
    raise exception 'a task of group "%" is to be unique: "%"%', p_group_key, left(p_unique, 40),
      case when p_idempotency_key is null then ', without an idempotency key' else '' end
      using errcode = 'QF006', hint = '"waiting" is the only way, and goes with an idempotency key: while a task with that key waits, a new one takes its place.';
  end if;
  <<places>>
  foreach v_shard_no in array p_shard_nos loop
    -- Repeated where the key was swept, or taken from its task, between two statements.
    loop
      insert into fairq.idempotency_keys as k (shard_no, queue, group_key, idempotency_key, task_id, fingerprint, created_at)
      values (v_shard_no, p_queue, p_group_key, p_idempotency_key, p_id, v_fingerprint, fairq._now())
      on conflict (shard_no, queue, group_key, idempotency_key) do nothing;
      exit when found;
      if p_unique is null then
        select k.task_id, k.fingerprint into v_known_id, v_known_fingerprint from fairq.idempotency_keys k
        where k.shard_no = v_shard_no and k.queue = p_queue and k.group_key = p_group_key and k.idempotency_key = p_idempotency_key;
        exit places when v_known_id <> p_id;
        -- The key is this task's own already, as with one that ended and is retried. It keeps the key: anyone who wants to take it from there waits.
        perform from fairq.idempotency_keys k
        where k.shard_no = v_shard_no and k.queue = p_queue and k.group_key = p_group_key and k.idempotency_key = p_idempotency_key and k.task_id = p_id
        for update;
        exit when found;
        continue;
      end if;
      delete from fairq.idempotency_keys k
      where k.shard_no = v_shard_no and k.queue = p_queue and k.group_key = p_group_key and k.idempotency_key = p_idempotency_key
      returning k.task_id into v_known_id;
      perform fairq._wish_to_cancel(t.shard_no, t.queue, t.group_key, v_known_id, true) from fairq._find_task(v_known_id) t;
    end loop;
  end loop places;
  if p_unique is not null or coalesce(v_known_id, p_id) = p_id then return null; end if;
  -- The key was known at the new place only, so the one just taken at the old place is given back.
  if cardinality(p_shard_nos) > 1 then
    delete from fairq.idempotency_keys k
    where k.shard_no = any(p_shard_nos) and k.queue = p_queue and k.group_key = p_group_key and k.idempotency_key = p_idempotency_key and k.task_id = p_id;
  end if;

  if v_known_fingerprint <> v_fingerprint and not p_any then
    raise exception 'the idempotency key "%" of group "%" belongs to task %, which has another kind or payload', p_idempotency_key, p_group_key, v_known_id
      using errcode = 'QF010', hint = 'Use a new key for a new task, or send exactly what was sent first.';
  end if;
  return v_known_id;
end;
$$;

-- Whether a NOTIFY is under way for this domain: one whose ring no promotion has heard yet. A second NOTIFY would tell workers nothing new, and it is
-- expensive: it takes a database-wide lock and holds it until the commit is on disk, so sessions that notify commit one after the other.
-- A promotion that runs right now may hear that ring and miss the caller's. So NOTIFY is a hint only: a worker that sleeps looks again a few milliseconds after
-- it last found something, and then after pauses that double. It learns of a transaction that was open for longer about as much later.
-- In READ COMMITTED only: an older snapshot does not know what was heard since, and in SERIALIZABLE these reads would make creators fail for each other.
-- Cost: one look-up in ticks and one in rings. An open transaction announces at most one of its rings, however many it has.
-- Stable and without "set search_path", so that it is inlined into the statement that asks.
create function fairq._announced(p_shard_no integer, p_queue text) returns table (is_announced boolean)
language sql stable rows 1 as $$
  select case
    when current_setting('transaction_isolation') <> 'read committed' then false
    else exists (
      select
      from (values (1)) one
      left join lateral (
        select t.next_xid, t.heard_xid from fairq.ticks t
        where t.shard_no = p_shard_no and t.queue = p_queue
        order by t.tick desc limit 1
      ) k on true
      cross join lateral (
        select from fairq.rings r
        where r.shard_no = p_shard_no and r.queue = p_queue and r.announced
          and r.xid >= coalesce(k.next_xid, '0') and r.xid <> coalesce(k.heard_xid, '0')
        limit 1
      ) r
    )
  end
$$;
