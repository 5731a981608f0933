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
grant usage, select on all sequences in schema fairq to fairq_admin;

-- Producers: what they call, and what those functions touch.
grant execute on function fairq.create_task, fairq.create_tasks, fairq.cancel_task, fairq.watch_task, fairq._check_task, fairq._claim_idempotency_key,
  fairq._refuse_queue, fairq._refuse_draining, fairq._announced, fairq._shard_of, fairq._shards, fairq._now
to fairq_enqueue;
grant select on fairq.settings, fairq.queues, fairq.schema_version to fairq_enqueue, fairq_work, fairq_observe;
grant insert on fairq.tasks, fairq.rings, fairq.cancellations, fairq.watches to fairq_enqueue;
grant select (shard_no, id, queue, group_key) on fairq.tasks to fairq_enqueue;
grant select (shard_no, queue, tick, next_xid, heard_xid) on fairq.ticks to fairq_enqueue;
grant select (shard_no, queue, xid, announced) on fairq.rings to fairq_enqueue;
grant select (shard_no, id, outcome, finished_at, result, error) on fairq.finished_tasks to fairq_enqueue;
grant select, insert on fairq.idempotency_keys to fairq_enqueue;
grant select on fairq.progress to fairq_enqueue;
grant usage on sequence fairq.task_ids, fairq.ring_ids to fairq_enqueue, fairq_work;

-- Workers: all but the settings.
grant execute on all functions in schema fairq to fairq_work;
revoke execute on function fairq.configure_cluster, fairq.configure_queue, fairq.configure_group, fairq.configure_key, fairq.pause_queue,
  fairq.resume_queue, fairq.pause_group, fairq.resume_group, fairq.purge_group, fairq.drain_queue, fairq.reset_rate, fairq.rebuild
from fairq_work;
grant select, insert, update, delete on
  fairq.tasks, fairq.ready, fairq.held, fairq.parked, fairq.rings, fairq.lanes, fairq.ticks, fairq.workers, fairq.heartbeats, fairq.cancellations,
  fairq.watches, fairq.idempotency_keys, fairq.sweeps, fairq.progress, fairq.upkeep_failures,
  fairq.finished_tasks, fairq.finished_tasks_default, fairq.attempts, fairq.attempts_default
to fairq_work;
-- A row lock asks for the right to update; these rows are never updated.
grant select, update on fairq.domains, fairq.maintenance to fairq_work;
grant select on fairq.groups to fairq_work;
grant usage on sequence fairq.worker_ids to fairq_work;
grant select on sequence fairq.task_ids to fairq_work;

-- Dashboards: what is going on, and no payloads.
grant execute on function fairq.explain_task, fairq._shards, fairq._now, fairq._allowance, fairq._lane, fairq._meters, fairq._obstacles, fairq.next_due_at, fairq._tick,
  fairq.rate_usage, fairq._rate_scope, fairq._check_group, fairq._refuse_queue, fairq._shard_of, fairq._policy, fairq._policy_of, fairq._settle, fairq.upkeep_parts
to fairq_observe;
grant select on fairq.live_tasks, fairq.queue_stats, fairq.group_stats, fairq.worker_stats, fairq.estimates to fairq_observe, fairq_work;
grant select on fairq.ready, fairq.held, fairq.parked, fairq.lanes, fairq.ticks, fairq.workers, fairq.domains, fairq.heartbeats, fairq.attempts, fairq.groups,
  fairq.progress, fairq.upkeep_failures
to fairq_observe;
grant select (shard_no, id, sequence, queue, group_key, kind, scheduled, priority, created_at, run_at, expires_at, cost, attempt, max_attempts,
  concurrency_key) on fairq.tasks to fairq_observe;
grant select (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at, started_at, finished_at,
  cost, attempt, max_attempts, concurrency_key) on fairq.finished_tasks to fairq_observe;
