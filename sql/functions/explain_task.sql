-- Why a task is not running, and what stands before it: one row, also for a task that ended; none for an unknown id.
-- ahead counts the tasks served before it as things stand: for a queued task those queued before it, for one in overflow those of its own
-- group plus, for each other group, the rounds until then are not guessed: ahead_in_group is exact, ahead is null.
create function fairq.explain_task(p_id bigint)
returns table (
  task_id bigint,
  state text,
  reason text,
  ahead_in_group bigint,
  ahead bigint,
  next_look_at timestamptz,
  worker_id bigint,
  attempt integer,
  max_attempts integer
)
language plpgsql
volatile
rows 1
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_task record;
  v_workers bigint;
begin
  select t.* into v_task
  from fairq._shards(null) s(shard_no)
  cross join lateral (
    select k.shard_no, k.id, k.queue, k.group_key, k.state, k.priority, k.sequence, k.block, k.position, k.run_at, k.expires_at,
      k.worker_id, k.attempt, k.max_attempts, k.concurrency_key
    from fairq.tasks k
    where k.shard_no = s.shard_no
      and k.id = p_id
    offset 0
  ) t;
  if not found then
    return query
      select f.id, f.outcome, format('ended as %s at %s', f.outcome, f.finished_at), null::bigint, null::bigint, null::timestamptz,
        f.worker_id, f.attempt, f.max_attempts
      from fairq._shards(null) s(shard_no)
      join fairq.finished_tasks f on f.shard_no = s.shard_no and f.id = p_id;
    return;
  end if;

  task_id := p_id;
  state := v_task.state;
  worker_id := v_task.worker_id;
  attempt := v_task.attempt;
  max_attempts := v_task.max_attempts;
  select count(*) into v_workers
  from fairq.workers w
  where w.shard_no = v_task.shard_no
    and v_task.queue = any(w.queues);

  if v_task.state in ('overflow', 'queued') then
    select count(*) into ahead_in_group
    from fairq.tasks t
    where t.shard_no = v_task.shard_no
      and t.queue = v_task.queue
      and t.group_key = v_task.group_key
      and t.state in ('overflow', 'queued')
      and (-t.priority, t.sequence) < (-v_task.priority, v_task.sequence);
  end if;
  if v_task.state = 'queued' then
    select count(*) into ahead
    from fairq.tasks t
    where t.shard_no = v_task.shard_no
      and t.queue = v_task.queue
      and t.state = 'queued'
      and (t.block, t.position) < (v_task.block, v_task.position);
  end if;

  if v_task.state in ('scheduled', 'overflow', 'blocked', 'queued') then
    select w.reason, w.look_at into reason, next_look_at
    from fairq._obstacles(v_task.shard_no, v_task.queue, v_task.group_key, v_task.concurrency_key, v_task.state, v_now) w
    order by w.nth
    limit 1;
  end if;
  reason := case
    when v_task.worker_id is not null
      then format('%s by worker %s, attempt %s of %s', v_task.state, v_task.worker_id, v_task.attempt, v_task.max_attempts)
    when v_task.expires_at <= v_now then format('expired at %s, to be ended', v_task.expires_at)
    when v_task.state = 'scheduled' and v_task.attempt > 0
      then format('waits for its back-off until %s, attempt %s of %s', v_task.run_at, v_task.attempt + 1, v_task.max_attempts)
    when v_task.state = 'scheduled' then format('scheduled at %s', v_task.run_at)
    when reason is not null then reason
    when v_workers = 0 then format('no live worker for queue "%s"', v_task.queue)
    when v_task.state = 'queued' then format('behind %s tasks in order', ahead)
    else format('behind %s tasks of its group, waiting for promotion', ahead_in_group)
  end;
  next_look_at := case when v_task.state = 'scheduled' then v_task.run_at else next_look_at end;
  return next;
end;
$$;
comment on function fairq.explain_task(bigint) is 'Why a task is not running, and what stands before it.';
