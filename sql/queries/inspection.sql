-- name: ReadWaits :many
-- How held tasks waited: since when; behind whom, by the ledger of at most ten minutes (the three groups that used most meanwhile); and what holds the group
-- back now, beside its turn.
-- fairq: not null started_at
-- fairq: nullable limited_by
select t.id, t.runnable_at, w.started_at, b.groups as behind, b.seconds as behind_seconds, l.reason as limited_by
from unnest(sqlc.arg(ids)::bigint[]) i(id)
cross join lateral (
  select t.shard_no, t.id, t.queue, t.group_key, greatest(t.created_at, t.run_at) as runnable_at
  from fairq._shards(null) n(shard_no)
  join fairq.tasks t on t.shard_no = n.shard_no
  where t.id = i.id
  offset 0
) t
cross join lateral (
  select h.started_at from fairq.held h where h.shard_no = t.shard_no and h.id = t.id and h.started_at is not null offset 0
) w
cross join lateral (
  select coalesce(array_agg(k.group_key order by k.seconds desc), '{}')::text[] as groups,
    coalesce(array_agg(k.seconds order by k.seconds desc), '{}')::double precision[] as seconds
  from (
    select p.group_key, sum(p.seconds) as seconds
    from generate_series(
      date_bin('30 seconds', greatest(t.runnable_at, w.started_at - interval '10 minutes'), timestamptz '2000-01-01 00:00:00+00'), w.started_at,
      '30 seconds'
    ) s(begins_at)
    join fairq.ledger p on p.shard_no = t.shard_no and p.begins_at = s.begins_at and p.queue = t.queue
    where p.group_key not in ('', t.group_key) and p.seconds > 0
    group by p.group_key
    order by seconds desc, p.group_key
    limit 3
  ) k
) b
left join lateral (
  select e.reason
  from (
    select x.id
    from (
      select x.id, x.shard_no
      from fairq.tasks x
      where x.shard_no = t.shard_no and x.queue = t.queue and x.group_key = t.group_key and not x.scheduled
      order by x.user_key, -x.priority, x.sequence
      limit 100
    ) x
    where not exists (select from fairq.held h where h.shard_no = x.shard_no and h.id = x.id offset 0)
    limit 1
  ) x
  cross join lateral fairq.explain_task(x.id) e
  where e.reason not like 'behind %'
) l on true;

-- name: QueueStats :many
-- Live tasks per queue and state.
select q.queue, q.scheduled, q.overflow, q.blocked, q.queued, q.claimed, q.running, q.waiting_groups, q.oldest_waiting_since
from fairq.queue_stats q
where sqlc.narg(queue)::text is null or q.queue = sqlc.narg(queue)::text
order by q.queue;

-- name: GroupStats :many
-- Live tasks per group and state, the busiest groups of each queue first.
select g.queue, g.group_key, g.scheduled, g.overflow, g.blocked, g.queued, g.claimed, g.running, g.oldest_waiting_since, g.budget_left,
  g.budget_renews_at
from (
  select s.*, row_number() over (partition by s.queue order by s.overflow + s.queued + s.claimed + s.running desc, s.group_key) as nth
  from fairq.group_stats s
  where sqlc.narg(queue)::text is null or s.queue = sqlc.narg(queue)::text
) g
where g.nth <= sqlc.arg(max_groups)::integer
order by g.queue, g.nth;

-- name: WorkerStats :many
-- Workers, their last sign of life and how many tasks they hold.
select w.worker_id, w.name, w.queues, w.slots, w.registered_at, w.lease, w.beat_at, w.alive, w.circuit_open,
  w.circuit_trips, w.held
from fairq.worker_stats w
where sqlc.narg(queue)::text is null or sqlc.narg(queue)::text = any(w.queues)
order by w.worker_id;

-- name: ScheduleStats :many
-- Schedules, next to fire first.
select s.name, s.group_key, s.owner, s.cron, s.time_zone, s.every, s.spread, s.missed, s.queue, s.kind, s.paused_at, s.next_tick, s.fire_at, s.plan_at,
  s.last_tick, s.last_task_id, s.last_state, s.problem
from fairq.schedule_stats s
where (sqlc.narg(name)::text is null or s.name = sqlc.narg(name)::text)
  and (sqlc.narg(group_key)::text is null or s.group_key = sqlc.narg(group_key)::text)
order by s.fire_at nulls last, s.name, s.group_key
limit sqlc.arg(most)::integer;

-- name: RowsEver :one
-- How many tasks were ever created and ended, by the server's statistics: cheap, however many rows the tables have.
select coalesce(sum(s.n_tup_ins) filter (where s.relname = 'tasks'), 0)::bigint as created,
  coalesce(sum(s.n_tup_ins) filter (where s.relname like 'finished!_tasks!_%' escape '!'), 0)::bigint as ended
from pg_catalog.pg_stat_all_tables s
where s.schemaname = 'fairq';

-- name: GroupIsKnown :one
-- Whether a group has settings or live tasks: a misspelt name is no error to the engine.
select exists (select from fairq.groups g where g.queue = sqlc.arg(queue)::text and g.group_key = sqlc.arg(group_key)::text)
  or exists (
    select from fairq.tasks t
    where t.shard_no = any(array(select fairq._shards(null))) and t.queue = sqlc.arg(queue)::text and t.group_key = sqlc.arg(group_key)::text
  ) as known;

-- name: MayReadErrors :one
-- Whether this role may read errors and notes.
select has_column_privilege('fairq.finished_tasks', 'error', 'select') and has_column_privilege('fairq.attempts', 'error', 'select')
  and has_column_privilege('fairq.progress', 'note', 'select') as yes;

-- name: Samples :many
-- The metrics. `max_groups` is how many groups have samples of their own, over all queues.
select m.name, m.labels::text as labels, m.value from fairq.metrics(sqlc.arg(max_groups)::integer) m where m.value is not null;
