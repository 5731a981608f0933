-- What operators send, over any driver: fairq.policies, and with it the command line. Settings go as the text of a JSON object and come back as one, with
-- intervals in seconds. Every query returns a row, so that in a pipeline its error is raised by the call that made it.

-- name: ConfigureQueue :one
-- Creates a queue, or changes its settings. An absent setting stays, null removes one.
select fairq._settings_json(fairq.configure_queue(p_queue => sqlc.arg(queue)::text, p_settings => sqlc.arg(settings)::text::jsonb))::text as settings;

-- name: ConfigureKind :one
-- Declares what holds for the tasks of a kind. An absent setting stays, null removes one.
select fairq._settings_json(fairq.configure_kind(
  p_queue => sqlc.arg(queue)::text, p_kind => sqlc.arg(kind)::text, p_settings => sqlc.arg(settings)::text::jsonb
))::text as settings;

-- name: ConfigureGroup :one
-- Changes settings of one group. An absent setting stays, null removes one, so that the queue's applies.
select fairq._settings_json(fairq.configure_group(
  p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text, p_settings => sqlc.arg(settings)::text::jsonb
))::text as settings;

-- name: ConfigureUser :one
-- Changes settings of one user of a group. An absent setting stays, null removes one, so that the group's or queue's setting for each user applies.
select fairq._settings_json(fairq.configure_user(
  p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text, p_user_key => sqlc.arg(user_key)::text,
  p_settings => sqlc.arg(settings)::text::jsonb
))::text as settings;

-- name: ConfigureKey :one
-- Changes how many tasks with a concurrency key may be in flight at once.
select fairq._settings_json(fairq.configure_key(
  p_concurrency_key => sqlc.arg(concurrency_key)::text, p_settings => sqlc.arg(settings)::text::jsonb
))::text as settings;

-- name: ConfigureCluster :one
-- Changes settings of the installation. An absent setting stays, null removes one.
select fairq._settings_json(fairq.configure_cluster(p_settings => sqlc.arg(settings)::text::jsonb))::text as settings;

-- name: MoveGroups :one
-- Moves the next group to the shard of its key, after the number of shards has changed. Returns how far the move has come.
select fairq.move_groups()::text as said;

-- name: PauseQueue :one
-- Stops serving a queue until it is resumed.
select fairq.pause_queue(p_queue => sqlc.arg(queue)::text)::text as done;

-- name: ResumeQueue :one
-- Serves a paused queue again, and accepts new tasks if it was draining.
select fairq.resume_queue(p_queue => sqlc.arg(queue)::text)::text as done;

-- name: DrainQueue :one
-- Refuses new tasks of a queue until it is resumed, and serves those that are there.
select fairq.drain_queue(p_queue => sqlc.arg(queue)::text)::text as done;

-- name: Rebuild :one
-- Makes anew what promotion knows of a queue, from its tasks and their holders.
select fairq.rebuild(p_queue => sqlc.arg(queue)::text)::text as done;

-- name: PauseGroup :one
-- Stops serving a group, or one of its users, until it is resumed.
select fairq.pause_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text, p_user_key => sqlc.narg(user_key)::text)::text as done;

-- name: ResumeGroup :one
-- Serves a paused group, or one of its users, again.
select fairq.resume_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text, p_user_key => sqlc.narg(user_key)::text)::text as done;

-- name: PurgeGroup :one
-- Cancels all waiting tasks of a group, or one of its users, that were created by a time, a text; null: all. Returns how many.
select fairq.purge_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text, p_user_key => sqlc.narg(user_key)::text,
  p_until => sqlc.narg(until)::text::timestamptz)::integer as ended;

-- name: HoldGroup :one
-- Starts nothing of a group before a time, a text; null ends a hold.
select fairq.hold_group(
  p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text, p_until => sqlc.narg(until)::text::timestamptz
)::text as done;

-- name: HoldKey :one
-- Starts nothing with a concurrency key before a time, a text; null ends a hold.
select fairq.hold_key(p_concurrency_key => sqlc.arg(concurrency_key)::text, p_until => sqlc.narg(until)::text::timestamptz)::text as done;

-- name: BudgetUsage :one
-- How much of a group's budget is used; no row: there is none.
-- fairq: not null budget_period, renews_at
select u.queue, u.group_key, u.budget,
  extract(epoch from u.budget_period)::double precision as budget_period,
  u.spent, u.reserved, u.available,
  to_char(u.renews_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as renews_at
from fairq.budget_usage(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text) u;

-- name: RateUsage :one
-- How much of the rate of a group, or of a whole queue, is used; no row: there is no rate.
-- fairq: nullable group_key
-- fairq: not null rate_period
select u.queue, u.group_key, u.rate_limit,
  extract(epoch from u.rate_period)::double precision as rate_period,
  u.rate_burst, u.used, u.available,
  to_char(u.next_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as next_at,
  to_char(u.full_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as full_at
from fairq.rate_usage(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.narg(group_key)::text) u;

-- name: ResetRate :one
-- Forgets how much of a rate was used, of a group or of a whole queue.
select fairq.reset_rate(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.narg(group_key)::text)::text as done;

-- name: ConfigureSchedule :one
-- Creates a schedule, or changes its settings. An absent setting stays, null removes one.
select fairq._settings_json(fairq.configure_schedule(
  p_name => sqlc.arg(name)::text, p_group_key => sqlc.arg(group_key)::text, p_settings => sqlc.arg(settings)::text::jsonb
))::text as settings;

-- name: PlanFirst :one
-- Stores the ticks of a schedule, which are texts; false: it has changed meanwhile.
select fairq.plan_schedule(
  p_name => sqlc.arg(name)::text, p_group_key => sqlc.arg(group_key)::text, p_done_until => sqlc.arg(done_until)::text::timestamptz,
  p_ticks => sqlc.arg(ticks)::text[]::timestamptz[]
)::boolean as planned;

-- name: PauseSchedule :one
-- Stops a schedule until it is resumed; without a group, those of all groups.
select fairq.pause_schedule(p_name => sqlc.arg(name)::text, p_group_key => sqlc.narg(group_key)::text)::integer as schedules;

-- name: ResumeSchedule :one
-- Resumes a paused schedule; without a group, those of all groups.
select fairq.resume_schedule(p_name => sqlc.arg(name)::text, p_group_key => sqlc.narg(group_key)::text)::integer as schedules;

-- name: RemoveSchedule :one
-- Removes a schedule; without a group, those of all groups.
select fairq.remove_schedule(p_name => sqlc.arg(name)::text, p_group_key => sqlc.narg(group_key)::text)::integer as schedules;

-- name: RunSchedule :many
-- Creates a task of a schedule now; without a group, one for each group.
select r.id::bigint as id
from fairq.run_schedule(p_name => sqlc.arg(name)::text, p_group_key => sqlc.narg(group_key)::text) as r(id);
