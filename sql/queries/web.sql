-- What the page asks: fairq.web. Every statement reads a bounded number of rows, whatever the backlog and the number of groups; a count that reaches its bound
-- means "at least". fairq_observe may send all but those that read payloads, results and errors.

-- name: Queues :many
-- The queues as they are. waiting counts up to max_count tasks in line; held tasks are in line, too.
-- fairq: nullable paused_at, draining_at, oldest_run_at
with held as materialized (
  select t.queue, count(*) as held, count(h.started_at) as running, min(h.started_at) as oldest_run_at
  from fairq.held h
  join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
  group by t.queue
)
select q.queue, q.paused_at, q.draining_at, q.fairness, coalesce(h.held, 0)::bigint as held, coalesce(h.running, 0)::bigint as running, h.oldest_run_at,
  l.waiting::bigint as waiting, s.scheduled::bigint as scheduled, k.blocked::bigint as blocked
from fairq.queues q
left join held h on h.queue = q.queue
cross join lateral (
  select count(*) as waiting
  from (
    select 1
    from fairq._shards(null) n(shard_no)
    cross join lateral (
      select from fairq.tasks t
      where t.shard_no = n.shard_no and t.queue = q.queue and not t.scheduled
      limit sqlc.arg(max_count)::integer
    ) t
    limit sqlc.arg(max_count)::integer
  ) c
) l
cross join lateral (
  select count(*) as scheduled
  from (
    select 1
    from fairq._shards(null) n(shard_no)
    cross join lateral (
      select from fairq.tasks t
      where t.shard_no = n.shard_no and t.queue = q.queue and t.scheduled
      limit sqlc.arg(max_count)::integer
    ) t
    limit sqlc.arg(max_count)::integer
  ) c
) s
cross join lateral (
  select count(*) as blocked
  from (
    select 1
    from fairq.parked p
    where p.queue = q.queue and not p.granted
    limit sqlc.arg(max_count)::integer
  ) c
) k
where not q.internal
order by q.queue;

-- name: QueueNames :many
-- The names of the queues.
select q.queue
from fairq.queues q
where not q.internal
order by q.queue;

-- name: HeldNow :many
-- How many slots each group has at this moment.
select t.queue, t.group_key, count(*)::bigint as slots
from fairq.held h
join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
where h.started_at is not null
group by t.queue, t.group_key;

-- name: Slots :many
-- The slots of the live workers of each queue. A worker of several queues counts in each of them.
select q.queue, sum(w.slots)::bigint as slots
from fairq.worker_stats w
cross join lateral unnest(w.queues) q(queue)
where w.alive
group by q.queue;

-- name: Minutes :many
-- From the ledger: worker seconds by minute and group, for the groups that had most; the group '' is all others. Slots are the whole queue's in that minute.
-- Each half minute is one index step, so other queues are not read.
with step as materialized (
  select n.shard_no, b.begins_at, date_bin('1 minute', b.begins_at, timestamptz '2000-01-01 00:00:00+00') as minute
  from fairq._shards(null) n(shard_no)
  cross join generate_series(sqlc.arg(since)::timestamptz, sqlc.arg(until)::timestamptz, '30 seconds') b(begins_at)
),
part as materialized (
  select s.minute, l.group_key, l.seconds
  from step s
  cross join lateral (
    select l.group_key, l.seconds
    from fairq.ledger l
    where l.shard_no = s.shard_no and l.begins_at = s.begins_at and l.queue = sqlc.arg(queue)::text
    offset 0
  ) l
),
most as materialized (
  select p.group_key
  from part p
  where p.group_key <> ''
  group by p.group_key
  order by sum(p.seconds) desc, p.group_key
  limit sqlc.arg(max_groups)::integer
),
whole as materialized (
  select s.minute, max(q.slots) as slots
  from step s
  cross join lateral (
    select q.slots
    from fairq.ledger_queues q
    where q.shard_no = s.shard_no and q.begins_at = s.begins_at and q.queue = sqlc.arg(queue)::text
    offset 0
  ) q
  group by s.minute
)
select p.minute::timestamptz as minute, coalesce(m.group_key, '')::text as group_key, sum(p.seconds)::double precision as seconds, w.slots::integer as slots
from part p
join whole w on w.minute = p.minute
left join most m on m.group_key = p.group_key
group by p.minute, m.group_key, w.slots
order by p.minute, m.group_key;

-- name: Standing :one
-- How one group of a queue stands. in_line counts up to max_count; ahead is the number of tasks before its next one.
-- fairq: nullable waiting_since, ahead, state, budget, available, renews_at
select l.running, l.in_line, l.waiting_since, e.state, e.ahead, b.budget, b.available, b.renews_at, clock_timestamp()::timestamptz as at
from (
  select count(*) filter (where c.is_held)::bigint as running, count(*)::bigint as in_line,
    min(greatest(c.created_at, c.run_at)) filter (where not c.is_held) as waiting_since,
    (array_agg(c.id order by c.line, c.sequence) filter (where not c.is_held))[1] as head
  from (
    select t.id, -t.priority as line, t.sequence, t.created_at, t.run_at,
      exists (select from fairq.held d where d.shard_no = t.shard_no and d.id = t.id) as is_held
    from fairq._shards(null) n(shard_no)
    cross join lateral (
      select t.shard_no, t.id, t.priority, t.sequence, t.created_at, t.run_at
      from fairq.tasks t
      where t.shard_no = n.shard_no and t.queue = sqlc.arg(queue)::text and t.group_key = sqlc.arg(group_key)::text and not t.scheduled
      order by -t.priority, t.sequence
      limit sqlc.arg(max_count)::integer
    ) t
  ) c
) l
left join lateral fairq.explain_task(l.head) e on l.head is not null
left join lateral fairq.budget_usage(sqlc.arg(queue)::text, sqlc.arg(group_key)::text) b on true;

-- name: Schedules :many
-- Schedules in the order of their names, from a given one on.
-- fairq: nullable cron, every, paused_at, next_tick, last_tick, last_task_id, problem, last_outcome
select s.name, s.group_key, s.cron, s.time_zone, s.every, s.queue, s.kind, s.paused_at, s.next_tick, s.last_tick, s.last_task_id, s.problem,
  f.outcome as last_outcome
from fairq._shards(null) n(shard_no)
cross join lateral (
  select c.shard_no, c.name, c.group_key, c.cron, c.time_zone, c.every, c.queue, c.kind, c.paused_at, c.next_tick, c.last_tick, c.last_task_id, c.problem
  from fairq.schedules c
  where c.shard_no = n.shard_no and (c.name, c.group_key) > (sqlc.arg(behind_name)::text, sqlc.arg(behind_group)::text)
  order by c.name, c.group_key
  limit sqlc.arg(max_schedules)::integer
) s
left join lateral (
  select f.outcome from fairq.finished_tasks f where f.shard_no = s.shard_no and f.id = s.last_task_id offset 0
) f on true
order by s.name, s.group_key
limit sqlc.arg(max_schedules)::integer;

-- name: NextGroups :many
-- Groups of a queue that have tasks in line, by name: one index step for each, so no backlog is read.
-- fairq: not null group_key
with recursive named as (
  (
    select min(f.group_key) as group_key, 1 as nth
    from fairq._shards(null) n(shard_no)
    cross join lateral (
      select t.group_key
      from fairq.tasks t
      where t.shard_no = n.shard_no and t.queue = sqlc.arg(queue)::text and t.group_key > sqlc.arg(behind)::text and not t.scheduled
      order by t.group_key
      limit 1
    ) f
  )
  union all
  select (
      select min(f.group_key)
      from fairq._shards(null) n(shard_no)
      cross join lateral (
        select t.group_key
        from fairq.tasks t
        where t.shard_no = n.shard_no and t.queue = sqlc.arg(queue)::text and t.group_key > g.group_key and not t.scheduled
        order by t.group_key
        limit 1
      ) f
    ), g.nth + 1
  from named g
  where g.group_key is not null and g.nth < sqlc.arg(max_groups)::integer
)
select g.group_key::text as group_key
from named g
where g.group_key is not null
order by g.group_key;

-- name: GroupsNow :many
-- How some groups of a queue stand. in_line counts up to max_count, held tasks included; head is the group's next task.
-- fairq: nullable weight, paused_at, oldest_since, head
-- fairq: not null group_key
with held as materialized (
  select t.group_key, count(*) as held
  from fairq.held h
  join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
  where t.queue = sqlc.arg(queue)::text
  group by t.group_key
)
select k.group_key, coalesce(h.held, 0)::bigint as held, l.in_line::bigint as in_line, l.oldest_since, l.head, g.weight, g.paused_at
from unnest(sqlc.arg(group_keys)::text[]) k(group_key)
left join held h on h.group_key = k.group_key
cross join lateral (
  select count(*) as in_line,
    min(greatest(c.created_at, c.run_at)) filter (where not c.is_held) as oldest_since,
    (array_agg(c.id order by c.line, c.sequence) filter (where not c.is_held))[1] as head
  from (
    select t.id, -t.priority as line, t.sequence, t.created_at, t.run_at,
      exists (select from fairq.held d where d.shard_no = t.shard_no and d.id = t.id) as is_held
    from fairq._shards(null) n(shard_no)
    cross join lateral (
      select t.shard_no, t.id, t.priority, t.sequence, t.created_at, t.run_at
      from fairq.tasks t
      where t.shard_no = n.shard_no and t.queue = sqlc.arg(queue)::text and t.group_key = k.group_key and not t.scheduled
      order by t.user_key, -t.priority, t.sequence
      limit sqlc.arg(max_count)::integer
    ) t
  ) c
) l
left join lateral (
  select g.weight, g.paused_at
  from fairq._shards(null) n(shard_no)
  join fairq.groups g on g.shard_no = n.shard_no
  where g.queue = sqlc.arg(queue)::text and g.group_key = k.group_key and g.user_key = ''
) g on true;

-- name: CountInLine :one
-- How many tasks of a group are in line, held ones included: up to max_count.
select count(*)::bigint as in_line
from (
  select 1
  from fairq._shards(null) n(shard_no)
  cross join lateral (
    select from fairq.tasks t
    where t.shard_no = n.shard_no and t.queue = sqlc.arg(queue)::text and t.group_key = sqlc.arg(group_key)::text and not t.scheduled
    limit sqlc.arg(max_count)::integer
  ) t
) c;

-- name: GroupTasks :many
-- The first tasks of a group: held ones first, then in the order in which they will be served, with the engine's reason why each is not running.
-- fairq: nullable started_at, worker_id, ahead
with line as materialized (
  select t.shard_no, t.id, t.kind, t.priority, t.sequence, t.created_at, t.run_at, h.started_at, h.worker_id
  from fairq._shards(null) n(shard_no)
  cross join lateral (
    select t.shard_no, t.id, t.kind, t.priority, t.sequence, t.created_at, t.run_at
    from fairq.tasks t
    where t.shard_no = n.shard_no and t.queue = sqlc.arg(queue)::text and t.group_key = sqlc.arg(group_key)::text and not t.scheduled
    order by t.user_key, -t.priority, t.sequence
    limit 1000
  ) t
  left join fairq.held h on h.shard_no = t.shard_no and h.id = t.id
  order by h.id is null, -t.priority, t.sequence
  limit sqlc.arg(max_tasks)::integer
)
select l.id, l.kind, l.priority, greatest(l.created_at, l.run_at) as runnable_at, l.started_at, l.worker_id, e.state, e.reason, e.ahead, e.attempt,
  e.max_attempts
from line l
cross join lateral fairq.explain_task(l.id) e
order by l.started_at is null, l.started_at, -l.priority, l.sequence;

-- name: ReasonsOf :many
-- Why some waiting tasks are not running, in the engine's words.
select e.task_id, e.state, e.reason
from unnest(sqlc.arg(ids)::bigint[]) i(id)
cross join lateral fairq.explain_task(i.id) e;

-- name: GroupScheduled :many
-- Tasks of a group that wait for a time, among the next 5,000 of its queue.
-- fairq: not null run_at
select t.id, t.kind, t.run_at, t.attempt, t.max_attempts
from (
  select t.id, t.group_key, t.kind, t.run_at, t.attempt, t.max_attempts
  from fairq._shards(null) n(shard_no)
  cross join lateral (
    select t.id, t.group_key, t.kind, t.run_at, t.attempt, t.max_attempts
    from fairq.tasks t
    where t.shard_no = n.shard_no and t.queue = sqlc.arg(queue)::text and t.scheduled
    order by t.run_at
    limit 5000
  ) t
) t
where t.group_key = sqlc.arg(group_key)::text
order by t.run_at
limit sqlc.arg(max_tasks)::integer;

-- name: Ended :many
-- The tasks that ended last, among those with the max_read highest ids; of a queue, group and kind, where given.
-- fairq: nullable worker_id, started_at
select f.id, f.queue, f.group_key, f.kind, f.outcome, f.worker_id, f.runnable_at, f.started_at, f.finished_at, f.attempt, f.max_attempts
from (
  select f.id, f.queue, f.group_key, f.kind, f.outcome, f.worker_id, greatest(f.created_at, f.run_at) as runnable_at, f.started_at, f.finished_at,
    f.attempt, f.max_attempts
  from fairq._shards(null) n(shard_no)
  cross join lateral (
    select f.id, f.queue, f.group_key, f.kind, f.outcome, f.worker_id, f.created_at, f.run_at, f.started_at, f.finished_at, f.attempt, f.max_attempts
    from fairq.finished_tasks f
    where f.shard_no = n.shard_no
    order by f.id desc
    limit sqlc.arg(max_read)::integer
  ) f
) f
where (sqlc.narg(queue)::text is null or f.queue = sqlc.narg(queue)::text)
  and (sqlc.narg(group_key)::text is null or f.group_key = sqlc.narg(group_key)::text)
  and (sqlc.narg(kind)::text is null or f.kind = sqlc.narg(kind)::text)
  and f.outcome = any(sqlc.arg(outcomes)::text[])
order by f.finished_at desc, f.id
limit sqlc.arg(max_tasks)::integer;

-- name: ErrorsOf :many
-- The errors with which some tasks ended. Not for fairq_observe.
-- fairq: nullable error
select f.id, f.error::text as error
from fairq.finished_tasks f
where f.shard_no = any(array(select fairq._shards(null))) and f.id = any(sqlc.arg(ids)::bigint[]);

-- name: BodyOf :one
-- What a task carries, and what it returned. Not for fairq_observe.
-- fairq: nullable headers, result
select left(t.payload::text, sqlc.arg(longest)::integer) as payload, left(t.headers::text, sqlc.arg(longest)::integer) as headers, null::text as result
from fairq.tasks t
where t.shard_no = any(array(select fairq._shards(null))) and t.id = sqlc.arg(id)::bigint
union all
select left(f.payload::text, sqlc.arg(longest)::integer), left(f.headers::text, sqlc.arg(longest)::integer),
  left(f.result::text, sqlc.arg(longest)::integer)
from fairq.finished_tasks f
where f.shard_no = any(array(select fairq._shards(null))) and f.id = sqlc.arg(id)::bigint;

-- name: MayRead :one
-- Whether this role may read bodies and errors.
select has_column_privilege('fairq.tasks', 'payload', 'select') and has_column_privilege('fairq.finished_tasks', 'error', 'select')
  and has_column_privilege('fairq.attempts', 'error', 'select') as bodies;

-- name: LongestRuns :many
-- The tasks that have been running longest.
select h.id, t.queue, t.group_key, t.kind, h.worker_id, h.started_at, h.attempt
from fairq.held h
join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
where h.started_at is not null
order by h.started_at, h.id
limit sqlc.arg(max_tasks)::integer;

-- name: UpkeepFailures :many
-- Parts of the upkeep that fail.
select f.shard_no, f.part, f.failed_since, f.failed_at, f.message
from fairq.upkeep_failures f
order by f.failed_since, f.part;

-- name: LastTicks :many
-- What promotion last saw of each queue.
-- fairq: nullable next_due_at
select d.shard_no, d.queue, t.tick, t.next_due_at, t.lane_count
from fairq.domains d
join fairq.queues q on q.queue = d.queue and not q.internal
cross join lateral (
  select t.tick, t.next_due_at, t.lane_count
  from fairq.ticks t
  where t.shard_no = d.shard_no and t.queue = d.queue
  order by t.tick desc
  limit 1
) t
order by d.queue, d.shard_no
limit 1000;

-- name: Beginning :one
-- Sets what a transaction that reads a page needs, and returns the time.
select clock_timestamp()::timestamptz as now,
  set_config('statement_timeout', sqlc.arg(statement_timeout)::text, true) as statement_timeout, set_config('jit', 'off', true) as jit,
  set_config('enable_seqscan', 'off', true) as seqscan;
