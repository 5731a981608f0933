-- name: ConfigureQueue :one
-- Creates a queue, or changes its settings; null leaves one as it is.
-- fairq: not null queue, max_attempts, retry_base, retry_cap, retention, notify
select q.queue, q.ready_target, q.max_attempts, q.retry_base, q.retry_cap, q.retention, q.notify
from fairq.configure_queue(
  p_queue => sqlc.arg(queue)::text,
  p_ready_target => sqlc.narg(ready_target)::integer,
  p_max_attempts => sqlc.narg(max_attempts)::integer,
  p_retry_base => sqlc.narg(retry_base)::interval,
  p_retry_cap => sqlc.narg(retry_cap)::interval,
  p_retention => sqlc.narg(retention)::interval,
  p_notify => sqlc.narg(notify)::boolean,
  p_weight => sqlc.narg(weight)::double precision,
  p_group_max_running => sqlc.narg(group_max_running)::integer,
  p_group_rate_limit => sqlc.narg(group_rate_limit)::integer,
  p_group_rate_period => sqlc.narg(group_rate_period)::interval,
  p_group_rate_burst => sqlc.narg(group_rate_burst)::integer,
  p_group_breaker_threshold => sqlc.narg(group_breaker_threshold)::integer,
  p_group_breaker_cooldown => sqlc.narg(group_breaker_cooldown)::interval,
  p_max_running => sqlc.narg(max_running)::integer,
  p_rate_limit => sqlc.narg(rate_limit)::integer,
  p_rate_period => sqlc.narg(rate_period)::interval,
  p_rate_burst => sqlc.narg(rate_burst)::integer,
  p_breaker_threshold => sqlc.narg(breaker_threshold)::integer,
  p_breaker_cooldown => sqlc.narg(breaker_cooldown)::interval,
  p_reset => sqlc.arg(reset)::text[]
) q;

-- name: ConfigureGroup :one
-- Changes settings of one group; null leaves one as it is, a name in reset takes the queue's default again.
-- fairq: not null queue, group_key
select g.queue, g.group_key, g.weight, g.max_running, g.rate_limit, g.rate_period, g.rate_burst, g.breaker_threshold, g.breaker_cooldown, g.paused_at
from fairq.configure_group(
  p_queue => sqlc.arg(queue)::text,
  p_group_key => sqlc.arg(group_key)::text,
  p_weight => sqlc.narg(weight)::double precision,
  p_max_running => sqlc.narg(max_running)::integer,
  p_rate_limit => sqlc.narg(rate_limit)::integer,
  p_rate_period => sqlc.narg(rate_period)::interval,
  p_rate_burst => sqlc.narg(rate_burst)::integer,
  p_breaker_threshold => sqlc.narg(breaker_threshold)::integer,
  p_breaker_cooldown => sqlc.narg(breaker_cooldown)::interval,
  p_reset => sqlc.arg(reset)::text[]
) g;

-- name: ConfigureKey :one
-- Changes how many tasks with a concurrency key may be in flight at once.
-- fairq: not null concurrency_key
select k.group_key as concurrency_key, k.max_running
from fairq.configure_key(
  p_concurrency_key => sqlc.arg(concurrency_key)::text,
  p_max_running => sqlc.narg(max_running)::integer,
  p_reset => sqlc.arg(reset)::text[]
) k;

-- name: ConfigureCluster :one
-- Changes settings of the installation; null leaves one as it is.
-- fairq: not null shard_count, payload_limit
select c.shard_count, c.payload_limit
from fairq.configure_cluster(
  p_shard_count => sqlc.narg(shard_count)::integer,
  p_payload_limit => sqlc.narg(payload_limit)::integer,
  p_max_running => sqlc.narg(max_running)::integer,
  p_reset => sqlc.arg(reset)::text[]
) c;

-- name: PauseQueue :exec
-- Stops serving a queue until it is resumed.
select fairq.pause_queue(p_queue => sqlc.arg(queue)::text);

-- name: ResumeQueue :exec
-- Serves a paused queue again.
select fairq.resume_queue(p_queue => sqlc.arg(queue)::text);

-- name: PauseGroup :exec
-- Stops serving a group until it is resumed.
select fairq.pause_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text);

-- name: ResumeGroup :exec
-- Serves a paused group again.
select fairq.resume_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text);

-- name: PurgeGroup :one
-- Cancels everything a group has waiting; returns how many tasks that were.
-- fairq: not null ended
select fairq.purge_group(p_queue => sqlc.arg(queue)::text, p_group_key => sqlc.arg(group_key)::text)::integer as ended;
