-- What must hold of every row of the hot path, whoever wrote it. Only where fairq is tested: see fairq.tasks in sql/schema/030_tables.sql.
alter table fairq.tasks
  add constraint state_is_known check (state in ('scheduled', 'overflow', 'blocked', 'queued', 'claimed', 'running')),
  add constraint address_iff_queued check ((block is not null and position is not null) = (state in ('queued', 'claimed', 'running'))),
  add constraint worker_iff_held check ((worker_id is not null) = (state in ('claimed', 'running'))),
  add constraint lease_iff_claimed check ((lease_expires_at is not null) = (state = 'claimed')),
  add constraint started_iff_running check ((started_at is not null) = (state = 'running')),
  add constraint cost_positive check (cost > 0 and cost < 'infinity'),
  add constraint attempt_in_range check (attempt between 0 and max_attempts);
alter table fairq.finished_tasks add constraint outcome_is_known check (outcome in ('succeeded', 'failed', 'cancelled', 'expired'));
alter table fairq.attempts add constraint outcome_is_known check (outcome in ('retry', 'worker_lost', 'released', 'lease_expired'));
alter table fairq.lanes add constraint waiting_if_admissible check (not admissible or cursors <> '{}');
