-- finish_tasks in one shard. A task leaves with one delete, whose conditions are the fencing token; history, attempts and rings come from what it returned.
-- Who finishes a task that recovery takes at the same moment waits for that row, then finds another worker in it, and gets nothing.
-- "is not distinct from" keeps the planner from reading the whole index of held tasks: the id is the way in.
create function fairq._finish(
  p_shard_no integer,
  p_worker_id bigint,
  p_ids bigint[],
  p_attempts integer[],
  p_outcomes text[],
  p_results jsonb[],
  p_errors jsonb[],
  p_retry_delays interval[]
) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
begin
  -- Those who wait for results are woken, if there are any to read: NOTIFY takes a database-wide lock at commit.
  if p_results is not null and array_remove(p_results, null) <> '{}' then
    perform pg_notify('fairq_done', case when cardinality(p_ids) <= 200 then array_to_string(p_ids, ',') else '' end);
  end if;
  return query
    with input as materialized (
      select i.id, i.attempt, coalesce(i.outcome, 'succeeded') as outcome, i.result, i.error, i.retry_delay
      from unnest(p_ids, p_attempts, p_outcomes, p_results, p_errors, p_retry_delays)
        as i(id, attempt, outcome, result, error, retry_delay)
    ),
    ended as (
      delete from fairq.tasks t
      using input i
      where t.shard_no = p_shard_no
        and t.id = i.id
        and t.attempt = i.attempt
        and t.worker_id is not distinct from p_worker_id
        and t.started_at is not null
        and (i.outcome <> 'retry' or t.attempt >= t.max_attempts)
      returning t.*, case when i.outcome = 'retry' then 'failed' else i.outcome end as outcome, i.result, i.error
    ),
    history as (
      insert into fairq.finished_tasks (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at,
        expires_at, started_at, finished_at, cost, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload,
        result, error)
      select e.shard_no, e.id, e.queue, e.group_key, e.kind, e.priority, e.outcome, e.worker_id, e.created_at, e.run_at,
        e.expires_at, e.started_at, v_now, e.cost, e.attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers,
        e.payload, e.result, e.error
      from ended e
    ),
    retried as (
      update fairq.tasks t
      set state = 'scheduled',
        run_at = v_now + coalesce(i.retry_delay, fairq._backoff(q.retry_base, q.retry_cap, t.attempt)),
        block = null, position = null, worker_id = null, started_at = null, lease_expires_at = null, counted = false
      from input i, fairq.queues q
      where i.outcome = 'retry'
        and t.shard_no = p_shard_no
        and t.id = i.id
        and t.attempt = i.attempt
        and t.worker_id is not distinct from p_worker_id
        and t.started_at is not null
        and t.attempt < t.max_attempts
        and q.queue = t.queue
      returning t.id, t.queue, t.group_key, t.attempt, t.run_at, i.error
    ),
    attempted as (
      insert into fairq.attempts (shard_no, task_id, attempt, worker_id, ended_at, outcome, error)
      select p_shard_no, r.id, r.attempt, p_worker_id, v_now, 'retry', r.error
      from retried r
    ),
    announced as (
      insert into fairq.rings (shard_no, queue, group_key, due_at)
      select p_shard_no, r.queue, min(r.group_key), min(r.run_at)
      from retried r
      group by r.queue
    ),
    freed as (
      insert into fairq.rings (shard_no, queue, group_key, freed)
      select p_shard_no, e.queue, e.group_key, count(*)
      from ended e
      where e.counted
      group by e.queue, e.group_key
    )
    select e.id from ended e
    union all
    select r.id from retried r;
end;
$$;
comment on function fairq._finish(integer, bigint, bigint[], integer[], text[], jsonb[], jsonb[], interval[]) is 'Ends attempts in one shard.';
