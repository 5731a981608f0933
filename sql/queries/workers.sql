-- What workers send: their turns, the calls of the keeper, and some of the command line. The turns are the hot path: they have only the
-- columns that a handler needs, and JSON as text, which is decoded once, to the handler's own type.

-- name: RegisterWorker :one
-- Registers a worker and returns its id.
select fairq.register_worker(
  p_name => sqlc.arg(name)::text,
  p_queues => sqlc.arg(queues)::text[],
  p_slots => sqlc.arg(slots)::integer,
  p_lease => sqlc.arg(lease)::interval,
  p_kinds => sqlc.narg(kinds)::jsonb
)::bigint as worker_id;

-- name: ClusterCap :one
-- The most tasks that may be in flight over all queues; null: no cap.
select s.max_running
from fairq.settings s;

-- name: Turn :many
-- A whole turn: writes what ended, starts, and asks for the next tasks. Returns the tasks, then a row of what was accepted.
-- fairq: nullable ended, started, due_in, timeout, headers, spared, losses, user_key
select t.ended, t.started, t.due_in, t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind,
  case when t.timeout is not null then t.started_at end as started_at, t.timeout, t.headers::text as headers, t.payload::text as payload,
  t.spared, t.losses, t.user_key
from fairq.turn(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_queues => sqlc.arg(queues)::text[],
  p_mosts => sqlc.arg(mosts)::integer[],
  p_limit => sqlc.arg(max_tasks)::integer,
  p_claim_lease => sqlc.narg(claim_lease)::interval,
  p_ended_ids => sqlc.arg(ended_ids)::bigint[],
  p_ended_attempts => sqlc.arg(ended_attempts)::integer[],
  p_outcomes => sqlc.narg(outcomes)::text[],
  p_results => sqlc.narg(results)::jsonb[],
  p_errors => sqlc.narg(errors)::jsonb[],
  p_retry_delays => sqlc.narg(retry_delays)::interval[],
  p_costs => sqlc.narg(costs)::double precision[],
  p_holds => sqlc.narg(holds)::text[],
  p_started_ids => sqlc.arg(started_ids)::bigint[],
  p_started_attempts => sqlc.arg(started_attempts)::integer[]
) t;

-- name: Standings :one
-- How far each of these queues has come; null: no task is in line.
select fairq.standings(p_queues => sqlc.arg(queues)::text[])::bigint[] as blocks;

-- name: ReleaseTasks :many
-- Gives tasks back, at no cost of an attempt. Returns the ids accepted.
select r.id::bigint as id
from fairq.finish_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[],
  p_outcomes => array_fill('released'::text, array[cardinality(sqlc.arg(ids)::bigint[])])
) as r(id);

-- name: HeldTasks :many
-- Which of these tasks the worker still holds. A task that an open transaction is ending is missing.
select h.id::bigint as id
from fairq.held_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[]
) as h(id);

-- name: TasksOfWorker :many
-- The tasks that a worker holds by the database: more than it knows of, after a connection broke in the middle of a pop.
select t.id, t.attempt, case when t.started_at is null then 'claimed' else 'running' end::text as state
from fairq.held t
where t.shard_no = any(array(select s.shard_no from fairq._shards(null) s(shard_no)))
  and t.worker_id = sqlc.arg(worker_id)::bigint;

-- name: ReportProgress :many
-- Reports how far running tasks are, and what they have used; notes are JSON text. Returns the ids accepted.
select r.id::bigint as id
from fairq.report_progress(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[],
  p_done => sqlc.arg(done)::double precision[],
  p_totals => sqlc.narg(totals)::double precision[],
  p_notes => sqlc.narg(notes)::jsonb[],
  p_costs => sqlc.narg(costs)::double precision[]
) as r(id);

-- name: Heartbeat :many
-- A worker's sign of life. Returns its tasks that are to be cancelled.
select h.id::bigint as id
from fairq.heartbeat(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.narg(ids)::bigint[],
  p_circuit_open => sqlc.narg(circuit_open)::boolean,
  p_circuit_trips => sqlc.narg(circuit_trips)::integer
) as h(id);

-- name: RetireWorker :exec
-- Removes a worker and puts the tasks it holds back in line.
select fairq.retire_worker(p_worker_id => sqlc.arg(worker_id)::bigint);

-- name: Maintain :one
-- Runs one part of upkeep, in a transaction of its own. Returns what it did, by name.
select fairq.maintain(p_part => sqlc.arg(part)::text)::jsonb as done;

-- name: UpkeepParts :many
-- The parts of upkeep, in order.
select u.part::text as part from fairq.upkeep_parts() u(part);

-- name: FireSchedules :one
-- Creates the tasks of schedules that are due. Returns {"fired", "last", "due_in", "unplanned"}.
select fairq.fire_schedules(p_limit => sqlc.arg(most)::integer, p_after => sqlc.narg(after_id)::bigint)::jsonb as fired;

-- name: UnplannedSchedules :many
-- Schedules by cron whose ticks are to be planned, and what time it is.
select u.name, u.group_key, u.cron, u.time_zone, u.done_until, u.now
from fairq.unplanned_schedules(p_limit => sqlc.arg(max_schedules)::integer) u;

-- name: PlanSchedule :one
-- Stores the ticks of a schedule; false: it has changed meanwhile.
select fairq.plan_schedule(
  p_name => sqlc.arg(name)::text,
  p_group_key => sqlc.arg(group_key)::text,
  p_done_until => sqlc.arg(done_until)::timestamptz,
  p_ticks => sqlc.arg(ticks)::timestamptz[],
  p_problem => sqlc.narg(problem)::text
)::boolean as planned;

-- name: TermsDiffer :one
-- Whether the role or the database has defaults that do not suit a turn.
-- fairq: not null differ
select current_setting('default_transaction_isolation') <> 'read committed' or current_setting('statement_timeout') <> '0' as differ;
