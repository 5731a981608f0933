-- name: CreateTask :one
-- Creates a task in the caller's transaction and returns its id.
-- fairq: not null id
select fairq.create_task(
  p_group_key => sqlc.arg(group_key)::text,
  p_payload => sqlc.arg(payload)::jsonb,
  p_queue => sqlc.arg(queue)::text,
  p_kind => sqlc.arg(kind)::text,
  p_priority => sqlc.arg(priority)::integer,
  p_run_at => sqlc.narg(run_at)::timestamptz,
  p_expires_at => sqlc.narg(expires_at)::timestamptz,
  p_max_attempts => sqlc.narg(max_attempts)::integer,
  p_cost => sqlc.arg(cost)::double precision,
  p_timeout => sqlc.narg(timeout)::interval,
  p_idempotency_key => sqlc.narg(idempotency_key)::text,
  p_concurrency_key => sqlc.narg(concurrency_key)::text,
  p_headers => sqlc.narg(headers)::jsonb,
  p_promote => sqlc.arg(promote)::boolean
)::bigint as id;

-- name: CreateTasks :many
-- Creates many tasks with one call and returns their ids in the order of the input.
-- fairq: not null id
select c.id::bigint as id
from fairq.create_tasks(
  p_group_keys => sqlc.arg(group_keys)::text[],
  p_payloads => sqlc.arg(payloads)::jsonb[],
  p_queue => sqlc.arg(queue)::text,
  p_kind => sqlc.arg(kind)::text,
  p_priority => sqlc.arg(priority)::integer,
  p_run_at => sqlc.narg(run_at)::timestamptz,
  p_expires_at => sqlc.narg(expires_at)::timestamptz,
  p_max_attempts => sqlc.narg(max_attempts)::integer,
  p_cost => sqlc.arg(cost)::double precision,
  p_timeout => sqlc.narg(timeout)::interval,
  p_idempotency_keys => sqlc.narg(idempotency_keys)::text[],
  p_concurrency_keys => sqlc.narg(concurrency_keys)::text[],
  p_headers => sqlc.narg(headers)::jsonb,
  p_priorities => sqlc.narg(priorities)::integer[],
  p_costs => sqlc.narg(costs)::double precision[],
  p_promote => sqlc.arg(promote)::boolean
) as c(id);

-- name: CancelTask :one
-- Cancels a task when the transaction commits; false: it is not live.
-- fairq: not null accepted
select fairq.cancel_task(sqlc.arg(id)::bigint)::boolean as accepted;

-- name: RetryTask :one
-- Runs an ended task again, or a scheduled one now; false: there is no such task.
-- fairq: not null accepted
select fairq.retry_task(sqlc.arg(id)::bigint)::boolean as accepted;
