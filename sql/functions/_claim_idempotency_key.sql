-- Takes an idempotency key for a new task. Equal keys wait for each other here, and only here, until the first one's transaction ends.
-- Returns the id of the task that has the key already; null: the key is ours.
-- Raises QF010 when that task has another payload or kind; in REPEATABLE READ and above, the usual 40001 when the other task came after the snapshot.
-- Locks: idempotency_keys, one row.
create function fairq._claim_idempotency_key(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_idempotency_key text,
  p_kind text,
  p_payload jsonb,
  p_id bigint
) returns bigint
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_fingerprint text := md5(p_kind || ' ' || p_payload::text);
  v_known record;
begin
  loop
    insert into fairq.idempotency_keys as k (shard_no, queue, group_key, idempotency_key, task_id, fingerprint, created_at)
    values (p_shard_no, p_queue, p_group_key, p_idempotency_key, p_id, v_fingerprint, fairq._now())
    on conflict (shard_no, queue, group_key, idempotency_key) do nothing;
    if found then
      return null;
    end if;

    select k.task_id, k.fingerprint into v_known
    from fairq.idempotency_keys k
    where k.shard_no = p_shard_no
      and k.queue = p_queue
      and k.group_key = p_group_key
      and k.idempotency_key = p_idempotency_key;
    exit when found;
    -- Swept between the two statements: take it now.
  end loop;

  if v_known.fingerprint <> v_fingerprint then
    raise exception 'the idempotency key "%" of group "%" belongs to task %, which has another kind or payload', p_idempotency_key, p_group_key, v_known.task_id
      using errcode = 'QF010', hint = 'Use a new key for a new task, or send exactly what was sent first.';
  end if;
  return v_known.task_id;
end;
$$;
comment on function fairq._claim_idempotency_key(integer, text, text, text, text, jsonb, bigint) is 'Takes an idempotency key, or returns the task that has it.';
