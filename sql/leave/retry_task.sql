-- Runs a task again: one that ended without success, with one attempt more than it had; or, now, one that waits for its back-off or schedule.
-- At most one task with the same idempotency key is in line. If another task has taken the key of an ended one since, retrying that is refused; without
-- p_strict it does nothing.
-- Returns true when there was something to do.
-- Raises QF016: the task ended, and its queue is draining; QF010: the task ended, and another one has its idempotency key.
-- Locks: its idempotency key, the task, and wishes to cancel it.
create function fairq.retry_task(p_id bigint, p_strict boolean default true) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
  v_now timestamptz := fairq._now();
  v_sequence bigint := nextval('fairq.task_ids');
  v_ended record;
  v_other_id bigint;
  v_task record;
begin
  -- Twice while groups move: the task may go to a shard that was looked at before.
  for v_shard_no in
    select s.shard_no
    from fairq.settings f
    cross join generate_series(1, case when f.moving_from is null then 1 else 2 end) round
    cross join fairq._shards(null) s(shard_no)
    order by round, s.shard_no
  loop
    -- The key comes first: a session that takes it from this task waits from now on, and then finds the task in line.
    select f.queue, f.group_key, f.idempotency_key, f.kind, f.payload into v_ended from fairq.finished_tasks f
    where f.shard_no = v_shard_no and f.id = p_id and f.outcome <> 'succeeded';
    if v_ended.idempotency_key is not null then
      v_other_id := fairq._take_idempotency_key(fairq._key_homes(v_ended.group_key), v_ended.queue, v_ended.group_key, v_ended.idempotency_key, null,
        v_ended.kind, v_ended.payload, p_id, p_any => true);
      if v_other_id is not null and p_strict then
        raise exception 'the idempotency key "%" of task % belongs to task % now', v_ended.idempotency_key, p_id, v_other_id
          using errcode = 'QF010', hint = 'That task does this work. If this one is to run nevertheless, create it anew with another key.';
      end if;
      if v_other_id is not null then return false; end if;
    end if;

    select b.shard_no, b.queue into v_task from fairq._begin_again(v_shard_no, p_id, v_sequence, v_now) b;
    if found then
      perform fairq._refuse_draining(q.queue) from fairq.queues q where q.queue = v_task.queue and q.draining_at is not null;
      -- It may have ended because somebody asked for it: that wish is fulfilled.
      delete from fairq.cancellations c where c.shard_no in (v_shard_no, v_task.shard_no) and c.task_id = p_id;
      exit;
    end if;

    update fairq.tasks t
    set scheduled = false, sequence = case when t.attempt = 0 then v_sequence else t.sequence end, run_at = v_now
    where t.shard_no = v_shard_no and t.id = p_id
      -- Not just "t.scheduled": with that the planner of a new installation takes the index of due tasks, and reads all of it.
      and t.scheduled is not distinct from true
    returning t.shard_no, t.queue into v_task;
    exit when found;
  end loop;
  if v_task.shard_no is null then return false; end if;

  perform fairq._announce(v_task.shard_no, array[p_id]);
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = v_task.queue and q.notify;
  return true;
end;
$$;
comment on function fairq.retry_task is 'Runs an ended task again, or a scheduled one now. False: there is no such task.';
