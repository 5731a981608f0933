-- Puts the tasks of a lost worker back in line, at most p_limit of them. A running task has used its attempt up: the loss is noted in
-- fairq.attempts, and without attempts left the task ends as failed. A claimed one that never started has not.
-- The worker is struck off once nothing of it is left, so a message of its comes to nothing.
-- A task that its worker is finishing this very moment is locked and skipped: let it.
-- Returns how many tasks it took from the worker.
-- Locks: the worker's row, then tasks, both "skip locked": a worker that is popping right now is alive.
-- Cost: tasks_held_idx, entries of this worker.
create function fairq._recover_worker(p_shard_no integer, p_worker_id bigint, p_limit integer, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_lost record;
  v_error jsonb := jsonb_build_object('code', 'worker_lost', 'message', format('worker %s gave no sign of life', p_worker_id));
begin
  perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id for update skip locked;
  if not found then
    return 0;
  end if;

  -- No "order by": the planner would get it from the primary key and read all tasks of the shard. Nobody is waited for, so order is of no matter.
  with held as materialized (
    select t.ctid, t.id, t.state, t.attempt, t.max_attempts, t.started_at
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.worker_id = p_worker_id
    limit p_limit
    for update skip locked
  ),
  noted as (
    insert into fairq.attempts (shard_no, task_id, attempt, worker_id, started_at, ended_at, outcome, error)
    select p_shard_no, h.id, h.attempt, p_worker_id, h.started_at, p_now, 'worker_lost', v_error
    from held h
    where h.state = 'running'
      and h.attempt < h.max_attempts
  )
  select count(*)::integer as tasks,
    array_agg(h.ctid) filter (where h.state = 'running' and h.attempt < h.max_attempts) as burned,
    array_agg(h.ctid) filter (where h.state = 'running' and h.attempt >= h.max_attempts) as failed,
    array_agg(h.ctid) filter (where h.state = 'claimed') as unstarted
  into v_lost
  from held h;

  if v_lost.tasks = 0 then
    if not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.worker_id = p_worker_id) then
      delete from fairq.heartbeats h where h.shard_no = p_shard_no and h.worker_id = p_worker_id;
      delete from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id;
    end if;
    return 0;
  end if;

  perform fairq._return_tasks(p_shard_no, v_lost.burned, true);
  perform fairq._return_tasks(p_shard_no, v_lost.unstarted, false);
  perform fairq._end_tasks(p_shard_no, v_lost.failed, 'failed', v_error, p_now);
  return v_lost.tasks;
end;
$$;
comment on function fairq._recover_worker(integer, bigint, integer, timestamptz) is 'Takes the tasks of a lost worker from it.';
