-- 0001_initial, the way back: nothing of fairq stays but the roles, which belong to the whole server.
--
-- Why:       to take fairq out of a database again.
-- Locks:     access exclusive on every table of fairq. Stop the workers first.
-- Loses:     nothing that you gave it: refused while there are tasks, history, groups or
--            queues with settings of their own.
--
-- Frozen from sql/ by tools/freeze.py. DO NOT EDIT: change sql/, then freeze.

-- What is being enqueued at this moment counts as well: wait for it, then look.
lock table fairq.tasks, fairq.finished_tasks, fairq.groups, fairq.queues in access exclusive mode;
do $$
begin
  if exists (select from fairq.tasks)
    or exists (select from fairq.finished_tasks)
    or exists (select from fairq.groups)
    or exists (select from fairq.queues where queue <> 'default' and not internal) then
    raise exception 'fairq still holds tasks, history or settings of yours, and this step would lose them'
      using errcode = 'QF090',
            hint = 'Let them end and save the history, or throw all away: drop schema fairq cascade.';
  end if;
end
$$;

drop function fairq.watch_task;
drop function fairq.start_tasks;
drop function fairq.retry_task;
drop function fairq.retire_worker;
drop function fairq.resume_queue;
drop function fairq.resume_group;
drop function fairq.reset_rate;
drop function fairq.report_progress;
drop function fairq.release_tasks;
drop function fairq.register_worker;
drop function fairq.rate_usage;
drop function fairq.purge_group;
drop function fairq.promote_overflow;
drop function fairq.pop_tasks;
drop function fairq.pause_queue;
drop function fairq.pause_group;
drop function fairq.next_due_at;
drop function fairq.maintain;
drop function fairq.held_tasks;
drop function fairq.heartbeat;
drop function fairq.finish_tasks;
drop function fairq.explain_task;
drop function fairq.drain_queue;
drop function fairq.create_tasks;
drop function fairq.create_task;
drop function fairq.configure_queue;
drop function fairq.configure_key;
drop function fairq.configure_group;
drop function fairq.configure_cluster;
drop function fairq.cancel_task;
drop function fairq._write_tick;
drop function fairq._wake_due;
drop function fairq._wake;
drop function fairq._unplace;
drop function fairq._unblock;
drop function fairq._touch_worker;
drop function fairq._tick;
drop function fairq._tell_watchers;
drop function fairq._take_place;
drop function fairq._take_keys;
drop function fairq._sweep_late_rings;
drop function fairq._sweep_keys;
drop function fairq._sweep_floor;
drop function fairq._sweep_domain;
drop function fairq._start;
drop function fairq._shards;
drop function fairq._settle;
drop function fairq._set_sweep_floor;
drop function fairq._set_limits;
drop function fairq._scopes;
drop function fairq._rotate_partitions;
drop function fairq._ring_wishes;
drop function fairq._ring_group;
drop function fairq._return_tasks;
drop function fairq._remove;
drop function fairq._refuse_queue;
drop function fairq._refuse_draining;
drop function fairq._recover_worker;
drop function fairq._recall_queued;
drop function fairq._rebuild_places;
drop function fairq._rebuild_lanes;
drop function fairq._rebuild;
drop function fairq._rebase;
drop function fairq._ready_target;
drop function fairq._rate_scope;
drop function fairq._ran;
drop function fairq._promote;
drop function fairq._pop;
drop function fairq._policy;
drop function fairq._place;
drop function fairq._obstacles;
drop function fairq._next_tasks;
drop function fairq._move_clock;
drop function fairq._meters_of;
drop function fairq._meter_limits;
drop function fairq._meter;
drop function fairq._lock_domain;
drop function fairq._line_up;
drop function fairq._leave;
drop function fairq._learn;
drop function fairq._last_block;
drop function fairq._lane;
drop function fairq._hold;
drop function fairq._held_by;
drop function fairq._hear_rings;
drop function fairq._has_news;
drop function fairq._groups_of_queued;
drop function fairq._give_up_claims;
drop function fairq._finish;
drop function fairq._expire_waiting;
drop function fairq._expected;
drop function fairq._end_tasks;
drop function fairq._counts;
drop function fairq._correct;
drop function fairq._configure_meter;
drop function fairq._claim_idempotency_key;
drop function fairq._check_task;
drop function fairq._check_reset;
drop function fairq._check_policy;
drop function fairq._check_limit;
drop function fairq._check_lengths;
drop function fairq._check_isolation;
drop function fairq._check_group;
drop function fairq._charge_meters;
drop function fairq._charge;
drop function fairq._cancel_waiting;
drop function fairq._block;
drop function fairq._beat;
drop function fairq._backoff;
drop function fairq._await_domain;
drop function fairq._announced;
drop function fairq._allowance;
drop function fairq._adopt;
drop function fairq._admit;
drop view fairq.estimates;
drop view fairq.worker_stats;
drop view fairq.group_stats;
drop view fairq.queue_stats;
drop table fairq.maintenance;
drop table fairq.sweeps;
drop table fairq.progress;
drop table fairq.heartbeats;
drop table fairq.workers;
drop table fairq.watches;
drop table fairq.cancellations;
drop table fairq.idempotency_keys;
drop table fairq.ticks;
drop table fairq.lanes;
drop type fairq.cursor;
drop table fairq.rings;
drop table fairq.attempts_default;
drop table fairq.attempts;
drop table fairq.finished_tasks_default;
drop table fairq.finished_tasks;
drop table fairq.tasks;
drop table fairq.domains;
drop type fairq.allowance;
drop type fairq.pace;
drop type fairq.estimate;
drop type fairq.gate;
drop type fairq.policy;
drop table fairq.groups;
drop table fairq.queues;
drop table fairq.settings;
drop sequence fairq.ring_ids;
drop sequence fairq.worker_ids;
drop sequence fairq.task_ids;
drop function fairq._now;
drop function fairq._is_span;
drop function fairq._shard_of;
drop function fairq._gap_end;
drop function fairq._lane_position;
drop function fairq._step;
drop function fairq._rounds;
drop function fairq._round;
