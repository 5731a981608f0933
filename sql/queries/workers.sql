-- name: RegisterWorker :one
-- Registers a worker and returns its id.
-- fairq: not null worker_id
select fairq.register_worker(
  p_name => sqlc.arg(name)::text,
  p_queues => sqlc.arg(queues)::text[],
  p_slots => sqlc.arg(slots)::integer,
  p_lease => sqlc.arg(lease)::interval
)::bigint as worker_id;

-- name: PopTasks :many
-- Hands the next tasks of a queue to a worker, in served order.
select t.shard_no, t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind, t.priority, t.created_at, t.run_at, t.expires_at,
  t.started_at, t.lease_expires_at, t.timeout, t.headers, t.payload
from fairq.pop_tasks(
  p_queue => sqlc.arg(queue)::text,
  p_limit => sqlc.arg(max_tasks)::integer,
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_claim_lease => sqlc.narg(claim_lease)::interval
) t;

-- name: StartTasks :many
-- Prefetch: claimed tasks begin to run; returns the ids the worker still holds.
-- fairq: not null id
select s.id::bigint as id
from fairq.start_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[]
) as s(id);

-- name: FinishTasks :many
-- Ends attempts of a worker's tasks; returns the ids accepted.
-- fairq: not null id
select f.id::bigint as id
from fairq.finish_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[],
  p_outcomes => sqlc.narg(outcomes)::text[],
  p_results => sqlc.narg(results)::jsonb[],
  p_errors => sqlc.narg(errors)::jsonb[],
  p_retry_delays => sqlc.narg(retry_delays)::interval[]
) as f(id);

-- name: ReleaseTasks :many
-- Puts tasks back in line without burning an attempt; returns the ids accepted.
-- fairq: not null id
select r.id::bigint as id
from fairq.release_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[]
) as r(id);

-- name: Heartbeat :many
-- A worker's sign of life; returns its tasks that are to be cancelled.
-- fairq: not null id
select h.id::bigint as id
from fairq.heartbeat(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.narg(ids)::bigint[]
) as h(id);

-- name: RetireWorker :exec
-- Takes a worker off the list and puts what it holds back in line.
select fairq.retire_worker(p_worker_id => sqlc.arg(worker_id)::bigint);

-- name: PromoteOverflow :one
-- Promotes a queue; pop_tasks does so by itself when it has to.
-- fairq: not null promoted
select fairq.promote_overflow(p_queue => sqlc.arg(queue)::text)::integer as promoted;

-- name: Maintain :one
-- One round of maintenance; returns what it did, by name.
-- fairq: not null done
select fairq.maintain()::jsonb as done;

-- name: HeldTasks :many
-- Which of these tasks the worker still holds; one that an open transaction is finishing is missing.
-- fairq: not null id
select h.id::bigint as id
from fairq.held_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[]
) as h(id);

-- name: ReportProgress :many
-- How far running tasks are; returns the ids accepted.
-- fairq: not null id
select r.id::bigint as id
from fairq.report_progress(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[],
  p_done => sqlc.arg(done)::double precision[],
  p_totals => sqlc.narg(totals)::double precision[],
  p_notes => sqlc.narg(notes)::jsonb[]
) as r(id);
