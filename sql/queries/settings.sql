-- name: ConfigureQueue :one
-- Creates a queue, or changes its settings; null leaves one as it is.
select q.queue, q.ready_target, q.max_attempts, q.retry_base, q.retry_cap, q.retention, q.notify
from fairq.configure_queue(
  p_queue => sqlc.arg(queue)::text,
  p_ready_target => sqlc.narg(ready_target)::integer,
  p_max_attempts => sqlc.narg(max_attempts)::integer,
  p_retry_base => sqlc.narg(retry_base)::interval,
  p_retry_cap => sqlc.narg(retry_cap)::interval,
  p_retention => sqlc.narg(retention)::interval,
  p_notify => sqlc.narg(notify)::boolean
) q;

-- name: ConfigureCluster :one
-- Changes settings of the installation; null leaves one as it is.
select c.shard_count, c.payload_limit
from fairq.configure_cluster(
  p_shard_count => sqlc.narg(shard_count)::integer,
  p_payload_limit => sqlc.narg(payload_limit)::integer
) c;
