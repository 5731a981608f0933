-- What applications send, over any driver: fairq.client, fairq.results, fairq.testing, and some of the command line.
-- Drivers write JSON, times and intervals in different ways, so such parameters come as text and are cast once more. For the same reason results are
-- texts and numbers; only GetTask, ExplainTask and TaskHistory return times, as the driver reads them. So the same statement serves psycopg, asyncpg, SQLAlchemy and
-- Django.

-- name: Enqueue :one
-- Creates a task in the caller's transaction and returns its id.
select fairq.create_task(
  p_group_key => sqlc.arg(group_key)::text,
  p_payload => sqlc.arg(payload)::text::jsonb,
  p_queue => sqlc.arg(queue)::text,
  p_kind => sqlc.arg(kind)::text,
  p_priority => sqlc.narg(priority)::integer,
  p_run_at => coalesce(sqlc.narg(run_at)::text::timestamptz,
    coalesce(nullif(current_setting('fairq.now', true), '')::timestamptz, clock_timestamp()) + sqlc.narg(delay)::text::interval),
  p_expires_at => sqlc.narg(expires_at)::text::timestamptz,
  p_max_attempts => sqlc.narg(max_attempts)::integer,
  p_cost => sqlc.narg(cost)::double precision,
  p_timeout => sqlc.narg(timeout)::text::interval,
  p_idempotency_key => sqlc.narg(idempotency_key)::text,
  p_concurrency_key => sqlc.narg(concurrency_key)::text,
  p_headers => sqlc.narg(headers)::text::jsonb,
  p_unique => sqlc.narg('unique')::text,
  p_user_key => sqlc.narg('user')::text
)::bigint as id;

-- name: EnqueueMany :many
-- Creates many tasks with one call and returns their ids in the order of the input.
select c.id::bigint as id
from fairq.create_tasks(
  p_group_keys => sqlc.arg(group_keys)::text[],
  p_payloads => sqlc.arg(payloads)::text[]::jsonb[],
  p_queue => sqlc.arg(queue)::text,
  p_kind => sqlc.arg(kind)::text,
  p_priority => sqlc.narg(priority)::integer,
  p_run_at => coalesce(sqlc.narg(run_at)::text::timestamptz,
    coalesce(nullif(current_setting('fairq.now', true), '')::timestamptz, clock_timestamp()) + sqlc.narg(delay)::text::interval),
  p_expires_at => sqlc.narg(expires_at)::text::timestamptz,
  p_max_attempts => sqlc.narg(max_attempts)::integer,
  p_cost => sqlc.narg(cost)::double precision,
  p_timeout => sqlc.narg(timeout)::text::interval,
  p_idempotency_keys => sqlc.narg(idempotency_key_each)::text[],
  p_concurrency_keys => sqlc.narg(concurrency_key_each)::text[],
  p_headers => sqlc.narg(headers)::text::jsonb,
  p_priorities => sqlc.narg(priority_each)::integer[],
  p_costs => sqlc.narg(cost_each)::double precision[],
  p_user_keys => sqlc.narg(user_each)::text[]
) as c(id);

-- name: GetTask :one
-- A task, live or ended; state is its outcome when it has ended.
-- fairq: nullable user_key, expires_at, started_at, finished_at, concurrency_key
select t.id, t.queue, t.group_key, l.user_key, t.kind, l.state, t.priority, t.cost, l.attempt, t.max_attempts,
  t.created_at, l.run_at, t.expires_at, l.started_at, null::timestamptz as finished_at, t.concurrency_key
from fairq.tasks t
join fairq.live_tasks l on l.shard_no = t.shard_no and l.id = t.id
where t.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))::integer[])
  and t.id = sqlc.arg(id)::bigint
union all
select f.id, f.queue, f.group_key, f.user_key, f.kind, f.outcome, f.priority, f.cost, f.attempt, f.max_attempts,
  f.created_at, coalesce(f.run_at, f.created_at), f.expires_at, f.started_at, f.finished_at, f.concurrency_key
from fairq.finished_tasks f
where f.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))::integer[])
  and f.id = sqlc.arg(id)::bigint
limit 1;

-- name: ExplainTask :one
-- Why a task is not running, and how much comes before it.
-- fairq: nullable ahead_in_group, ahead, next_look_at, worker_id
select e.task_id, e.state, e.reason, e.ahead_in_group, e.ahead, e.next_look_at, e.worker_id, e.attempt, e.max_attempts
from fairq.explain_task(p_id => sqlc.arg(id)::bigint)
  as e(task_id, state, reason, ahead_in_group, ahead, next_look_at, worker_id, attempt, max_attempts);

-- name: Cancel :one
-- Cancels a task when the transaction commits; false: it is not live.
select fairq.cancel_task(sqlc.arg(id)::bigint)::boolean as accepted;

-- name: RetryTask :one
-- Runs an ended task again, or a scheduled one now; false: there is no such task.
select fairq.retry_task(sqlc.arg(id)::bigint, p_strict => sqlc.arg(strict)::boolean)::boolean as accepted;

-- name: CancelMany :one
-- Cancels the live tasks of a queue, as `cancel_task` does, or only counts them. Returns how many.
select count(*) filter (where case when sqlc.arg(dry_run)::boolean then true else fairq.cancel_task(t.id) end)::bigint as tasks
from (
  select t.id
  from fairq.tasks t
  where t.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))::integer[])
    and t.queue = sqlc.arg(queue)::text
    and (sqlc.narg(group_key)::text is null or t.group_key = sqlc.narg(group_key)::text)
    and (sqlc.narg(kind)::text is null or t.kind = sqlc.narg(kind)::text)
  order by t.id
) t;

-- name: RetryMany :one
-- Runs ended tasks of a queue again, as `retry_task` does, or only counts them. Returns how many.
select count(*) filter (where case when sqlc.arg(dry_run)::boolean then true else fairq.retry_task(f.id, p_strict => false) end)::bigint as tasks
from (
  select f.id
  from fairq.finished_tasks f
  where f.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))::integer[])
    and f.queue = sqlc.arg(queue)::text
    and (sqlc.narg(group_key)::text is null or f.group_key = sqlc.narg(group_key)::text)
    and (sqlc.narg(kind)::text is null or f.kind = sqlc.narg(kind)::text)
    and f.outcome = sqlc.arg(outcome)::text
    and (sqlc.narg(since)::text is null or f.finished_at >= sqlc.narg(since)::text::timestamptz)
  order by f.id
) f;

-- name: FinishOne :many
-- Ends one attempt; no row: the worker does not hold it any more.
select f.id::bigint as id
from fairq.finish_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => array[sqlc.arg(id)::bigint],
  p_attempts => array[sqlc.arg(attempt)::integer],
  p_outcomes => array[sqlc.arg(outcome)::text],
  p_results => array[sqlc.narg(result)::text::jsonb],
  p_errors => array[sqlc.narg(error)::text::jsonb],
  p_retry_delays => array[sqlc.narg(retry_delay)::text::interval],
  p_costs => array[sqlc.narg(cost)::double precision],
  p_holds => array[sqlc.narg(hold)::text]
) as f(id);

-- name: LookAtResult :one
-- How a task ended, or whether it is still live.
-- fairq: always
-- fairq: nullable outcome, finished_at, result, error
select r.outcome,
  to_char(r.finished_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as finished_at,
  r.result::text as result,
  r.error::text as error,
  r.live,
  current_setting('transaction_isolation')::text as isolation,
  now()::text as transaction_began,
  (pg_current_xact_id_if_assigned() is not null)::boolean as has_written
from fairq.task_result(p_id => sqlc.arg(id)::bigint) r;

-- name: TaskHistory :many
-- Django: a task with its last attempt, and its earlier attempts, which have no kind, in the order of their starts. An attempt that has not begun called no
-- function.
-- fairq: not null has_begun
-- fairq: nullable kind, queue, created_at, finished_at, outcome, worker_id, started_at, headers, payload, result, error
select h.kind, h.queue, h.created_at, h.finished_at, h.outcome, h.worker_id, h.started_at, h.headers::text as headers,
  h.payload::text as payload, h.result::text as result, h.error::text as error,
  (h.started_at is not null and coalesce(h.outcome, '') not in ('declined', 'lease_expired'))::boolean as has_begun
from fairq.task_history(p_id => sqlc.arg(id)::bigint) h
order by h.started_at;

-- name: LatestProgress :one
-- What a running task last reported of its progress; no row: it has reported nothing, or is not live.
-- fairq: nullable done, total, note
select p.attempt, p.done, p.total, p.note::text as note
from fairq.task_progress(p_id => sqlc.arg(id)::bigint) p;

-- name: WatchTask :one
-- Asks for a notice on fairq_done when the task ends, for a minute; false: it is not live.
select fairq.watch_task(sqlc.arg(id)::bigint)::boolean as live;

-- name: BackendPid :one
-- The server process of the session. A pooler gives its clients another number.
select pg_catalog.pg_backend_pid()::integer as pid;

-- name: IsListening :one
-- Whether the session listens to anything.
select exists (select from pg_catalog.pg_listening_channels())::boolean as listens;

-- name: RegisterTester :one
-- Tests: registers the worker that drains queues in the test's own transaction.
select fairq.register_worker(sqlc.arg(name)::text, sqlc.arg(queues)::text[], 1, interval '1 hour')::bigint as worker_id;

-- name: PopOne :many
-- Tests: the next task of a queue.
-- fairq: nullable headers, user_key
select t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.user_key, t.kind,
  extract(epoch from t.timeout)::double precision as seconds, t.headers::text as headers, t.payload::text as payload
from fairq.pop_tasks(p_queue => sqlc.arg(queue)::text, p_limit => 1, p_worker_id => sqlc.arg(worker_id)::bigint) t;

-- name: SetClock :one
-- Tests: stops the engine's clock at this time until the transaction ends; an empty text lets it run again. Returns whether this installation obeys.
-- fairq: not null obeyed
select (select s.test_clock from fairq.settings s) as obeyed, set_config('fairq.now', sqlc.arg(at)::text, true)::text as at;

-- name: LiveTasks :many
-- Tests: live tasks in the order they were created.
-- fairq: not null run_at
select t.id, t.queue, t.kind, t.group_key, l.user_key, l.state, t.priority, l.attempt,
  to_char(l.run_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as run_at,
  t.headers::text as headers, t.payload::text as payload, t.concurrency_key, t.idempotency_key
from fairq.tasks t
join fairq.live_tasks l on l.shard_no = t.shard_no and l.id = t.id
where t.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))::integer[])
  and (sqlc.narg(kind)::text is null or t.kind = sqlc.narg(kind)::text)
  and (sqlc.narg(queue)::text is null or t.queue = sqlc.narg(queue)::text)
  and (sqlc.narg(group_key)::text is null or t.group_key = sqlc.narg(group_key)::text)
order by t.id;
