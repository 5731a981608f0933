-- What must hold of every row of the hot path, whoever wrote it. Only where fairq is tested: see fairq.tasks in sql/schema/030_tables.sql.
alter table fairq.tasks
  add constraint cost_positive check (cost > 0 and cost < 'infinity'),
  add constraint attempt_in_range check (attempt between 0 and max_attempts),
  add constraint losses_are_spared check (coalesce(losses, 1) between 1 and 2 and coalesce(losses, 0) <= coalesce(spared, 0));
alter table fairq.held
  add constraint lease_iff_claimed check (lease_expires_at is null or started_at is null),
  add constraint attempt_positive check (attempt >= 1),
  add constraint meters_known check (meters between 0 and 7);
alter table fairq.ready add constraint address_not_negative check (block >= 0 and position >= 0);
alter table fairq.parked add constraint granted_has_no_turn check (not granted or turn is null);
alter table fairq.finished_tasks add constraint outcome_is_known check (outcome in ('succeeded', 'failed', 'cancelled', 'expired'));
alter table fairq.attempts add constraint outcome_is_known check (outcome in ('retry', 'worker_lost', 'released', 'declined', 'postponed', 'lease_expired'));
alter table fairq.lanes
  add constraint waiting_if_admissible check (not admissible or cursors <> '{}' or keyed),
  add constraint no_count_below_zero check (coalesce((gate).in_flight, 0) >= 0 and coalesce((gate).uncounted, 0) >= 0);
-- The clock may be moved by tests, also for what recovers and drops.
update fairq.settings set test_clock = true;
