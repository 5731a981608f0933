-- name: ExplainTask :one
-- Why a task is not running, and how much comes before it.
-- fairq: nullable ahead_in_group, ahead, next_look_at, worker_id
select e.task_id, e.state, e.reason, e.ahead_in_group, e.ahead, e.next_look_at, e.worker_id, e.attempt, e.max_attempts
from fairq.explain_task(p_id => sqlc.arg(id)::bigint)
  as e(task_id, state, reason, ahead_in_group, ahead, next_look_at, worker_id, attempt, max_attempts);

-- name: GetTask :one
-- A task, live or ended; its state, or its outcome.
-- fairq: nullable expires_at, started_at, finished_at, concurrency_key
select t.id, t.queue, t.group_key, t.kind, l.state, t.priority, t.cost, l.attempt, t.max_attempts,
  t.created_at, t.run_at, t.expires_at, l.started_at, null::timestamptz as finished_at, t.concurrency_key
from fairq.tasks t
join fairq.live_tasks l on l.shard_no = t.shard_no and l.id = t.id
where t.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))::integer[])
  and t.id = sqlc.arg(id)::bigint
union all
select f.id, f.queue, f.group_key, f.kind, f.outcome, f.priority, f.cost, f.attempt, f.max_attempts,
  f.created_at, f.run_at, f.expires_at, f.started_at, f.finished_at, f.concurrency_key
from fairq.finished_tasks f
where f.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))::integer[])
  and f.id = sqlc.arg(id)::bigint
limit 1;

-- name: QueueStats :many
-- Live tasks per queue and state.
select q.queue, q.scheduled, q.overflow, q.blocked, q.queued, q.claimed, q.running, q.waiting_groups, q.oldest_waiting_since
from fairq.queue_stats q
order by q.queue;

-- name: GroupStats :many
-- Live tasks of a queue per group and state, busiest first.
select g.queue, g.group_key, g.scheduled, g.overflow, g.blocked, g.queued, g.claimed, g.running, g.oldest_waiting_since, g.budget_left,
  g.budget_renews_at
from fairq.group_stats g
where g.queue = sqlc.arg(queue)::text
order by g.overflow + g.queued + g.claimed + g.running desc, g.group_key
limit sqlc.arg(max_groups)::integer;

-- name: WorkerStats :many
-- Workers, their last sign of life and how many tasks they hold.
select w.worker_id, w.name, w.queues, w.slots, w.registered_at, w.lease, w.beat_at, w.circuit_open, w.circuit_trips,
  w.held
from fairq.worker_stats w
order by w.worker_id;
