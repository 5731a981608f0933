-- What workers send: the turns, the keeper, the commands of operators. The turns are the hot path: only the columns that a handler
-- needs, and JSON as text, which is decoded once, to the handler's own type.

-- name: RegisterWorker :one
-- Registers a worker and returns its id.
-- fairq: always
-- fairq: not null worker_id
select fairq.register_worker(
  p_name => sqlc.arg(name)::text,
  p_queues => sqlc.arg(queues)::text[],
  p_slots => sqlc.arg(slots)::integer,
  p_lease => sqlc.arg(lease)::interval
)::bigint as worker_id;

-- name: ClusterCap :one
-- The most tasks that may be in flight over all queues; null: no cap.
select g.max_running
from fairq.groups g
where g.shard_no = 0
  and g.queue = '#meters'
  and g.group_key = 'cluster';

-- name: PopTasks :many
-- The next tasks of one queue, in served order.
-- fairq: not null payload
-- fairq: nullable headers
select t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind, case when t.timeout is not null then t.started_at end as started_at,
  t.timeout, t.headers::text as headers, t.payload::text as payload
from fairq.pop_tasks(
  p_queue => sqlc.arg(queue)::text,
  p_limit => sqlc.arg(max_tasks)::integer,
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_claim_lease => sqlc.narg(claim_lease)::interval
) t;

-- name: PopTasksInSteps :many
-- The next tasks of several queues, asked step by step: each step takes at most its own number, and what the steps before it left of the
-- budget. A queue may be asked again for what others left over, but not when it gave less than it was asked for: it has no more.
-- fairq: not null id, attempt, max_attempts, queue, group_key, kind, payload
with recursive asked as (
  select 0 as place, sqlc.arg(max_tasks)::integer as budget, '{}'::text[] as emptied, null::fairq.tasks[] as popped
  union all
  select a.place + 1, a.budget - p.popped_count, case when p.popped_count < s.most then a.emptied || s.queue else a.emptied end, p.popped
  from asked a
  cross join lateral (
    select (sqlc.arg(queues)::text[])[a.place + 1] as queue, least(a.budget, (sqlc.arg(mosts)::integer[])[a.place + 1]) as most
  ) s
  cross join lateral (
    -- A case, for nothing else promises that a function is not called.
    select n.popped, coalesce(cardinality(n.popped), 0) as popped_count
    from (
      select case
        when s.queue <> all(a.emptied) then (
          select array_agg(t)
          from fairq.pop_tasks(
            p_queue => s.queue,
            p_limit => s.most,
            p_worker_id => sqlc.arg(worker_id)::bigint,
            p_claim_lease => sqlc.narg(claim_lease)::interval
          ) t
        )
      end as popped
      offset 0
    ) n
  ) p
  where a.budget > 0
    and a.place < cardinality(sqlc.arg(queues)::text[])
)
select t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind, case when t.timeout is not null then t.started_at end as started_at,
  t.timeout, t.headers::text as headers, t.payload::text as payload
from asked a
cross join lateral unnest(a.popped) t;

-- name: NextDueIn :one
-- Seconds until one of these queues has to be looked at although nothing rings; null: no such time.
-- fairq: nullable seconds
select extract(epoch from min(fairq.next_due_at(q.queue)) - fairq._now())::double precision as seconds
from unnest(sqlc.arg(queues)::text[]) q(queue);

-- name: StartTasks :many
-- Prefetch: claimed tasks begin to run; returns the ids to run, which the worker still holds.
-- fairq: not null id
select s.id::bigint as id
from fairq.start_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[]
) as s(id);

-- name: FinishTasks :many
-- Ends attempts; results and errors are JSON text. Returns the ids accepted.
-- fairq: not null id
-- fairq: raw results, errors
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
-- Gives tasks back without burning an attempt; returns the ids accepted.
-- fairq: not null id
select r.id::bigint as id
from fairq.release_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[]
) as r(id);

-- name: HeldTasks :many
-- Which of these tasks the worker still holds; one that an open transaction is finishing is missing.
-- fairq: not null id
select h.id::bigint as id
from fairq.held_tasks(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[]
) as h(id);

-- name: TasksOfWorker :many
-- What a worker holds by the book: after a connection broke in the middle of a pop, more than it knows of.
select t.id, t.attempt, t.state
from fairq.tasks t
where t.shard_no = any(array(select s.shard_no from fairq._shards(null) s(shard_no)))
  and t.worker_id = sqlc.arg(worker_id)::bigint;

-- name: ReportProgress :many
-- How far running tasks are; notes are JSON text. Returns the ids accepted.
-- fairq: not null id
-- fairq: raw notes
select r.id::bigint as id
from fairq.report_progress(
  p_worker_id => sqlc.arg(worker_id)::bigint,
  p_ids => sqlc.arg(ids)::bigint[],
  p_attempts => sqlc.arg(attempts)::integer[],
  p_done => sqlc.arg(done)::double precision[],
  p_totals => sqlc.narg(totals)::double precision[],
  p_notes => sqlc.narg(notes)::jsonb[]
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

-- name: Maintain :one
-- One round of maintenance; returns what it did, by name.
-- fairq: not null done
select fairq.maintain()::jsonb as done;
