-- What is known of a task and of its attempts; Django's results are read with it. It shows payloads and headers, so not every role that enqueues may call it,
-- only those to which it is granted.
-- Returns one row for the task, with its last attempt or the one that runs, and one for each earlier attempt, whose kind is null. No row for an unknown id, or
-- for a task in a queue of other roles. It is one statement: a task that ends meanwhile is seen in one of the tables.
-- Cost: per shard one step in tasks_pkey, and one in each day of the history and of the attempts.
create function fairq.task_history(p_id bigint)
returns table (kind text, queue text, headers jsonb, payload jsonb, created_at timestamptz, finished_at timestamptz, outcome text, result jsonb, error jsonb,
  worker_id bigint, started_at timestamptz)
language sql stable rows 3 security definer set search_path = pg_catalog, pg_temp as $$
  with known as materialized (
    select t.kind, t.queue, t.headers, t.payload, t.created_at, null::timestamptz as finished_at, null::text as outcome, null::jsonb as result,
      null::jsonb as error, h.worker_id, h.started_at
    from fairq.tasks t
    left join lateral (select g.worker_id, g.started_at from fairq.held g where g.shard_no = t.shard_no and g.id = t.id offset 0) h on true
    where t.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))) and t.id = p_id
    union all
    select f.kind, f.queue, f.headers, f.payload, f.created_at, f.finished_at, f.outcome, f.result, f.error, f.worker_id, f.started_at
    from fairq.finished_tasks f
    where f.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))) and f.id = p_id
  )
  select k.* from known k where fairq._may_ask(k.queue)
  union all
  select null, null, null, null, null, null, a.outcome, null, a.error, a.worker_id, a.started_at
  from fairq.attempts a
  where a.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))) and a.task_id = p_id
    and exists (select from known k where fairq._may_ask(k.queue))
$$;
comment on function fairq.task_history is 'What is known of a task, and of each of its attempts.';
