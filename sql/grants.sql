-- Four roles, none of which can log in: grant them to the users that do. Nothing is granted to PUBLIC.
--   fairq_enqueue   applications: create, cancel, read a result
--   fairq_work      workers: pop, finish, heartbeat, maintain
--   fairq_observe   dashboards: views and explain_task; no payloads
--   fairq_admin     operators: all of it, and the settings
do $$
declare
  v_role text;
begin
  foreach v_role in array array['fairq_enqueue', 'fairq_work', 'fairq_observe', 'fairq_admin'] loop
    begin
      -- Roles belong to the whole cluster: another database may have made them, perhaps at this very moment.
      if not exists (select from pg_catalog.pg_roles r where r.rolname = v_role) then
        execute format('create role %I nologin', v_role);
      end if;
    exception when duplicate_object or unique_violation then
      null;
    end;
  end loop;
end;
$$;

revoke all on schema fairq from public;
revoke all on all tables in schema fairq from public;
revoke all on all sequences in schema fairq from public;
revoke all on all functions in schema fairq from public;

grant usage on schema fairq to fairq_enqueue, fairq_work, fairq_observe, fairq_admin;
grant execute on all functions in schema fairq to fairq_admin;
grant select, insert, update, delete on all tables in schema fairq to fairq_admin;
grant usage on all sequences in schema fairq to fairq_admin;

grant execute on function
  fairq.create_task(text, jsonb, text, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text, jsonb, boolean),
  fairq.create_tasks(text[], jsonb[], text, text, integer, timestamptz, timestamptz, integer, double precision, interval, text[], text[], jsonb, integer[], double precision[], boolean),
  fairq.cancel_task(bigint),
  fairq.watch_task(bigint, interval),
  fairq._check_task(text, jsonb, integer, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text),
  fairq._claim_idempotency_key(integer, text, text, text, text, jsonb, bigint),
  fairq._refuse_queue(text),
  fairq._refuse_draining(text),
  fairq._announced(integer, text),
  fairq._shard_of(text, integer),
  fairq._shards(integer),
  fairq._now()
to fairq_enqueue, fairq_work;
grant select on fairq.settings, fairq.queues to fairq_enqueue, fairq_work, fairq_observe;
grant select on fairq.schema_version to fairq_enqueue, fairq_work, fairq_observe;
grant insert on fairq.tasks, fairq.rings, fairq.cancellations, fairq.watches to fairq_enqueue;
grant select (shard_no, id, queue, group_key, state, worker_id) on fairq.tasks to fairq_enqueue;
grant select (shard_no, queue, tick, next_xid, heard_xid) on fairq.ticks to fairq_enqueue;
grant select (shard_no, queue, xid, announced) on fairq.rings to fairq_enqueue;
grant select (shard_no, id, outcome, finished_at, result, error) on fairq.finished_tasks to fairq_enqueue;
grant select, insert on fairq.idempotency_keys to fairq_enqueue;
grant select on fairq.progress to fairq_enqueue;
grant usage on sequence fairq.task_ids, fairq.ring_ids to fairq_enqueue, fairq_work;

grant execute on all functions in schema fairq to fairq_work;
revoke execute on function
  fairq.configure_cluster(integer, integer, integer, text[]),
  fairq.configure_queue(text, integer, integer, interval, interval, interval, boolean, double precision, text, integer, integer, interval, integer, integer, interval, integer, integer, interval, integer, integer, interval, text[]),
  fairq.configure_group(text, text, double precision, integer, integer, interval, integer, integer, interval, text[]),
  fairq.configure_key(text, integer, text[]),
  fairq.pause_queue(text),
  fairq.resume_queue(text),
  fairq.pause_group(text, text),
  fairq.resume_group(text, text),
  fairq.purge_group(text, text),
  fairq.drain_queue(text),
  fairq.reset_rate(text, text)
from fairq_work;
grant select, insert, update, delete on
  fairq.tasks, fairq.rings, fairq.lanes, fairq.ticks, fairq.workers, fairq.heartbeats, fairq.cancellations, fairq.watches, fairq.idempotency_keys, fairq.sweeps, fairq.progress,
  fairq.finished_tasks, fairq.finished_tasks_default, fairq.attempts, fairq.attempts_default
to fairq_work;
-- A row lock asks for the right to update; these rows are never updated.
grant select, update on fairq.domains, fairq.maintenance to fairq_work;
grant select on fairq.groups to fairq_work;
grant usage on sequence fairq.worker_ids to fairq_work;

grant execute on function fairq.explain_task(bigint), fairq._shards(integer), fairq._now(), fairq._allowance(fairq.policy, fairq.gate, timestamptz),
  fairq._lane(integer, text, text), fairq._obstacles(integer, text, text, text, text, timestamptz), fairq.next_due_at(text), fairq._tick(integer, text),
  fairq.rate_usage(text, text), fairq._rate_scope(text, text), fairq._check_group(text, text), fairq._refuse_queue(text), fairq._shard_of(text, integer),
  fairq._policy(fairq.queues, fairq.groups), fairq._settle(fairq.policy, fairq.gate, integer, integer, boolean, timestamptz)
to fairq_observe;
grant select on fairq.queue_stats, fairq.group_stats, fairq.worker_stats, fairq.estimates to fairq_observe, fairq_work;
grant select on fairq.lanes, fairq.ticks, fairq.workers, fairq.domains, fairq.heartbeats, fairq.attempts, fairq.groups, fairq.progress to fairq_observe;
grant select (shard_no, id, sequence, queue, group_key, kind, state, priority, block, position, worker_id, created_at, run_at, expires_at,
  started_at, lease_expires_at, cost, attempt, max_attempts, counted, concurrency_key) on fairq.tasks to fairq_observe;
grant select (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at, started_at, finished_at,
  cost, attempt, max_attempts, concurrency_key) on fairq.finished_tasks to fairq_observe;
