-- What operators send, over any driver: fairq.policies, and with it the command line. As in client.sql, times and intervals go as texts, and come back as
-- texts and seconds. Every one answers, so that in a pipeline its error is seen where it was called.

-- name: ConfigureQueue :one
-- Creates a queue, or changes its settings; null leaves one as it is.
-- fairq: always
-- fairq: not null queue, max_attempts, retry_base, retry_cap, retention, notify, weight, fairness
-- fairq: nullable ready_target, group_max_running, group_rate_limit, group_rate_period, group_rate_burst, group_breaker_threshold, group_breaker_cooldown
-- fairq: nullable max_running, rate_limit, rate_period, rate_burst, breaker_threshold, breaker_cooldown, paused_at, draining_at
select q.queue, q.ready_target, q.max_attempts,
  extract(epoch from q.retry_base)::double precision as retry_base,
  extract(epoch from q.retry_cap)::double precision as retry_cap,
  extract(epoch from q.retention)::double precision as retention,
  q.notify, q.weight, q.fairness, q.group_max_running, q.group_rate_limit,
  extract(epoch from q.group_rate_period)::double precision as group_rate_period,
  q.group_rate_burst, q.group_breaker_threshold,
  extract(epoch from q.group_breaker_cooldown)::double precision as group_breaker_cooldown,
  m.max_running, m.rate_limit,
  extract(epoch from m.rate_period)::double precision as rate_period,
  m.rate_burst, m.breaker_threshold,
  extract(epoch from m.breaker_cooldown)::double precision as breaker_cooldown,
  to_char(q.paused_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as paused_at,
  to_char(q.draining_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as draining_at
from fairq.configure_queue(
  p_queue => sqlc.arg(queue)::text,
  p_ready_target => sqlc.narg(ready_target)::integer,
  p_max_attempts => sqlc.narg(max_attempts)::integer,
  p_retry_base => sqlc.narg(retry_base)::text::interval,
  p_retry_cap => sqlc.narg(retry_cap)::text::interval,
  p_retention => sqlc.narg(retention)::text::interval,
  p_notify => sqlc.narg(notify)::boolean,
  p_weight => sqlc.narg(weight)::double precision,
  p_fairness => sqlc.narg(fairness)::text,
  p_group_max_running => sqlc.narg(group_max_running)::integer,
  p_group_rate_limit => sqlc.narg(group_rate_limit)::integer,
  p_group_rate_period => sqlc.narg(group_rate_period)::text::interval,
  p_group_rate_burst => sqlc.narg(group_rate_burst)::integer,
  p_group_breaker_threshold => sqlc.narg(group_breaker_threshold)::integer,
  p_group_breaker_cooldown => sqlc.narg(group_breaker_cooldown)::text::interval,
  p_max_running => sqlc.narg(max_running)::integer,
  p_rate_limit => sqlc.narg(rate_limit)::integer,
  p_rate_period => sqlc.narg(rate_period)::text::interval,
  p_rate_burst => sqlc.narg(rate_burst)::integer,
  p_breaker_threshold => sqlc.narg(breaker_threshold)::integer,
  p_breaker_cooldown => sqlc.narg(breaker_cooldown)::text::interval,
  p_reset => sqlc.arg(reset)::text[]
) q
cross join lateral fairq._meter_limits('queue ' || q.queue) m;

-- name: ConfigureGroup :one
-- Changes settings of one group; null leaves one as it is, a name in reset takes the queue's default again.
-- fairq: always
-- fairq: not null queue, group_key
-- fairq: nullable weight, max_running, rate_limit, rate_period, rate_burst, breaker_threshold, breaker_cooldown, paused_at
select g.queue, g.group_key, g.weight, g.max_running, g.rate_limit,
  extract(epoch from g.rate_period)::double precision as rate_period,
  g.rate_burst, g.breaker_threshold,
  extract(epoch from g.breaker_cooldown)::double precision as breaker_cooldown,
  to_char(g.paused_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as paused_at
from fairq.configure_group(
  p_queue => sqlc.arg(queue)::text,
  p_group_key => sqlc.arg(group_key)::text,
  p_weight => sqlc.narg(weight)::double precision,
  p_max_running => sqlc.narg(max_running)::integer,
  p_rate_limit => sqlc.narg(rate_limit)::integer,
  p_rate_period => sqlc.narg(rate_period)::text::interval,
  p_rate_burst => sqlc.narg(rate_burst)::integer,
  p_breaker_threshold => sqlc.narg(breaker_threshold)::integer,
  p_breaker_cooldown => sqlc.narg(breaker_cooldown)::text::interval,
  p_reset => sqlc.arg(reset)::text[]
) g;

-- name: ConfigureKey :one
-- Changes how many tasks with a concurrency key may be in flight at once.
-- fairq: always
-- fairq: not null concurrency_key
-- fairq: nullable max_running
select k.group_key as concurrency_key, k.max_running
from fairq.configure_key(
  p_concurrency_key => sqlc.arg(concurrency_key)::text,
  p_max_running => sqlc.narg(max_running)::integer,
  p_reset => sqlc.arg(reset)::text[]
) k;

-- name: ConfigureCluster :one
-- Changes settings of the installation; null leaves one as it is.
-- fairq: always
-- fairq: not null shard_count, payload_limit
-- fairq: nullable max_running
select c.shard_count, c.payload_limit, m.max_running
from fairq.configure_cluster(
  p_shard_count => sqlc.narg(shard_count)::integer,
  p_payload_limit => sqlc.narg(payload_limit)::integer,
  p_max_running => sqlc.narg(max_running)::integer,
  p_reset => sqlc.arg(reset)::text[]
) c
cross join lateral fairq._meter_limits(case when c.singleton then 'cluster' end) m;

-- name: PauseQueue :one
-- Stops serving a queue until it is resumed.
-- fairq: always
-- fairq: not null done
select fairq.pause_queue(p_queue => sqlc.arg(queue)::text)::text as done;

-- name: ResumeQueue :one
-- Serves a paused queue again, and takes new tasks where it was draining.
-- fairq: always
-- fairq: not null done
select fairq.resume_queue(p_queue => sqlc.arg(queue)::text)::text as done;

-- name: DrainQueue :one
-- Refuses new tasks of a queue and serves those that are there, until it is resumed.
-- fairq: always
-- fairq: not null done
select fairq.drain_queue(p_queue => sqlc.arg(queue)::text)::text as done;

-- name: PauseGroup :one
-- Stops serving a group until it is resumed.
-- fairq: always
-- fairq: not null done
select fairq.pause_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text)::text as done;

-- name: ResumeGroup :one
-- Serves a paused group again.
-- fairq: always
-- fairq: not null done
select fairq.resume_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text)::text as done;

-- name: PurgeGroup :one
-- Cancels everything a group has waiting; returns how many tasks that were.
-- fairq: always
-- fairq: not null ended
select fairq.purge_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text)::integer as ended;

-- name: RateUsage :one
-- How much of the rate of a group, or of a whole queue, is used; no row: there is no rate.
-- fairq: not null queue, rate_limit, rate_period, rate_burst, used, available
-- fairq: nullable group_key, next_at, full_at
select u.queue, u.group_key, u.rate_limit,
  extract(epoch from u.rate_period)::double precision as rate_period,
  u.rate_burst, u.used, u.available,
  to_char(u.next_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as next_at,
  to_char(u.full_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as full_at
from fairq.rate_usage(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.narg(group_key)::text) u;

-- name: ResetRate :one
-- Forgets what was used of the rate of a group, or of a whole queue.
-- fairq: always
-- fairq: not null done
select fairq.reset_rate(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.narg(group_key)::text)::text as done;
