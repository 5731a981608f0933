-- Four roles, none of which can log in: grant them to the users that do. Nothing is granted to PUBLIC.
--   fairq_enqueue   applications: create, cancel, read a result
--   fairq_work      workers: pop, finish, heartbeat, maintain; and all that fairq_enqueue and fairq_observe may
--   fairq_observe   dashboards: views and explain_task; no payloads, results, errors or notes
--   fairq_admin     operators: all functions, and they read everything
-- Only the owner writes tables, and producers read none: public functions run with the owner's rights (security definer), and call the private ones. Their
-- search path ends with pg_temp, which would come first if it were not named: so no temporary type or table of the caller takes the place of another.
do $$
declare
  v_role text;
begin
  foreach v_role in array array['fairq_enqueue', 'fairq_work', 'fairq_observe', 'fairq_admin'] loop
    begin
      -- Roles are shared by all databases of the server: another one may have made them, perhaps at this very moment.
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
grant select on fairq.schema_version to fairq_enqueue, fairq_work, fairq_observe, fairq_admin;

grant execute on function fairq.create_task, fairq.create_tasks, fairq.cancel_task, fairq.watch_task, fairq.task_result, fairq.task_progress
to fairq_enqueue, fairq_work;

grant execute on function fairq.register_worker, fairq.turn, fairq.pop_tasks, fairq.start_tasks, fairq.finish_tasks, fairq.held_tasks,
  fairq.heartbeat, fairq.report_progress, fairq.task_history, fairq.retire_worker, fairq.promote_overflow, fairq.maintain,
  fairq.fire_schedules, fairq.unplanned_schedules, fairq.plan_schedule, fairq.standings
to fairq_work;

grant execute on function fairq.explain_task, fairq.next_due_at, fairq.rate_usage, fairq.budget_usage, fairq.shares, fairq.fairness, fairq.metrics,
  fairq.upkeep_parts, fairq._shards
to fairq_work, fairq_observe;
grant select on fairq.settings, fairq.queues, fairq.kinds, fairq.groups, fairq.live_tasks, fairq.queue_stats, fairq.group_stats, fairq.tenants,
  fairq.worker_stats, fairq.schedule_stats, fairq.estimates, fairq.ready, fairq.held, fairq.parked, fairq.lanes, fairq.ticks, fairq.workers, fairq.domains,
  fairq.heartbeats, fairq.upkeep_failures, fairq.ledger, fairq.ledger_queues, fairq.totals
to fairq_work, fairq_observe;
grant select (shard_no, id, sequence, queue, group_key, kind, scheduled, priority, created_at, run_at, expires_at, cost, attempt, max_attempts,
  spared, losses, concurrency_key, user_key) on fairq.tasks to fairq_work, fairq_observe;
grant select (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at, started_at, finished_at,
  cost, used, attempt, max_attempts, concurrency_key, user_key) on fairq.finished_tasks to fairq_work, fairq_observe;
grant select (shard_no, name, group_key, owner, cron, time_zone, every, spread, delay, missed, queue, kind, priority, concurrency_key, created_at, done_until,
  next_tick, fire_at, plan_at, paused_at, last_tick, last_task_id, problem, ticks) on fairq.schedules to fairq_work, fairq_observe;
grant select (shard_no, task_id, worker_id, started_at, ended_at, used, attempt, outcome) on fairq.attempts to fairq_work, fairq_observe;
grant select (shard_no, task_id, reported_at, attempt, done, total, used) on fairq.progress to fairq_work, fairq_observe;

grant execute on all functions in schema fairq to fairq_admin;
grant select on all tables in schema fairq to fairq_admin;
