create view fairq.queue_stats as
select q.queue,
  count(*) filter (where t.state = 'scheduled') as scheduled, count(*) filter (where t.state = 'overflow') as overflow,
  count(*) filter (where t.state = 'blocked') as blocked, count(*) filter (where t.state = 'queued') as queued,
  count(*) filter (where t.state = 'claimed') as claimed, count(*) filter (where t.state = 'running') as running,
  count(distinct t.group_key) filter (where t.state in ('overflow', 'blocked', 'queued')) as waiting_groups,
  min(greatest(t.created_at, t.run_at)) filter (where t.state in ('overflow', 'queued')) as oldest_waiting_since
from fairq.queues q
left join fairq.live_tasks t on t.queue = q.queue
where not q.internal
group by q.queue;
comment on view fairq.queue_stats is 'Live tasks per queue and state. Counts all live tasks: for people and dashboards, not for a tight loop.';

create view fairq.group_stats as
select s.queue, s.group_key, s.scheduled, s.overflow, s.blocked, s.queued, s.claimed, s.running, s.oldest_waiting_since,
  b.available as budget_left, b.renews_at as budget_renews_at
from (
  select t.queue, t.group_key,
    count(*) filter (where t.state = 'scheduled') as scheduled, count(*) filter (where t.state = 'overflow') as overflow,
    count(*) filter (where t.state = 'blocked') as blocked, count(*) filter (where t.state = 'queued') as queued,
    count(*) filter (where t.state = 'claimed') as claimed, count(*) filter (where t.state = 'running') as running,
    min(greatest(t.created_at, t.run_at)) filter (where t.state in ('overflow', 'queued')) as oldest_waiting_since
  from fairq.live_tasks t
  group by t.queue, t.group_key
) s
join fairq.queues q on q.queue = s.queue
left join lateral (
  select u.available, u.renews_at
  from (select where q.fairness <> 'count' offset 0) gate
  cross join lateral fairq.budget_usage(s.queue, s.group_key) as u(queue, group_key, budget, budget_period, spent, reserved, available, renews_at)
) b on true;
comment on view fairq.group_stats is 'Live tasks per queue, group and state, and what is left of budgets. Counts all live tasks.';

-- What an operator sees of a tenant, in one row. The column key is for admin pages, which want one column that identifies a row.
create view fairq.tenants as
select jsonb_build_array(coalesce(s.queue, g.queue), coalesce(s.group_key, g.group_key))::text as key, coalesce(s.queue, g.queue) as queue,
  coalesce(s.group_key, g.group_key) as group_key,
  coalesce(s.overflow + s.blocked + s.queued, 0) as waiting,
  coalesce(s.scheduled, 0) as scheduled,
  coalesce(s.claimed + s.running, 0) as running,
  s.oldest_waiting_since, g.paused_at, g.weight, g.max_running, g.rate_limit, g.rate_period
from fairq.group_stats s
full join (
  select o.queue, o.group_key, o.paused_at, o.weight, o.max_running, o.rate_limit, o.rate_period
  from fairq.groups o
  join fairq.queues q on q.queue = o.queue and not q.internal
  where o.user_key = ''
) g on g.queue = s.queue and g.group_key = s.group_key;
comment on view fairq.tenants is 'Groups that have live tasks or settings of their own. Counts all live tasks.';

create view fairq.worker_stats as
select w.worker_id, w.name, w.queues, w.slots, w.registered_at, w.lease,
  b.beat_at, clock_timestamp() <= coalesce(b.beat_at, w.registered_at) + w.lease as alive, b.circuit_open, b.circuit_trips,
  (select count(*) from fairq.held t where t.worker_id = w.worker_id) as held
from fairq.workers w
left join lateral (
  select h.beat_at, h.circuit_open, h.circuit_trips from fairq.heartbeats h
  where h.shard_no = w.shard_no and h.worker_id = w.worker_id
  order by h.beat_at desc limit 1
) b on true
where w.shard_no = 0 and w.lost_at is null;
comment on view fairq.worker_stats is 'Workers, their last sign of life and how many tasks they hold.';

create view fairq.estimates as
select l.queue, l.group_key, e.kind, e.used, e.cost, e.tasks
from fairq.lanes l
cross join lateral unnest((l.pace).estimates) as e(kind, tasks, used, cost)
where l.queue not like '#%';
comment on view fairq.estimates is
  'What tasks of a group and kind use, where groups share that: the mean of the last attempts, the mean of the costs they were created with, and how many '
  'were measured, up to 16.';

create view fairq.schedule_stats as
select s.name, s.group_key, s.owner, s.cron, s.time_zone, s.every, s.spread, s.missed, s.queue, s.kind, s.paused_at, s.next_tick, s.fire_at, s.plan_at,
  s.last_tick, s.last_task_id, coalesce(f.outcome, l.state) as last_state, s.problem
from fairq.schedules s
left join lateral (
  -- The task may have ended in another shard, before its group moved.
  select f.outcome from fairq.finished_tasks f
  where f.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no))) and f.id = s.last_task_id
  offset 0
) f on true
left join lateral (
  select l.state from fairq.live_tasks l where l.shard_no = s.shard_no and l.id = s.last_task_id offset 0
) l on true;
comment on view fairq.schedule_stats is
  'Schedules, when each fires next, and how its last task ended, or what it is doing. A few look-ups per schedule: for people and dashboards.';
