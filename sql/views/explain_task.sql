-- Why a task is not running, and what comes before it. Returns one row, also for an ended task; none for an unknown id.
-- ahead_in_group: for a queued task and one in overflow, the waiting tasks before it in its own line (its group's, or its user's there). ahead: for a queued
-- task, the queued tasks before it; null in overflow, where it would depend on rounds to come.
create function fairq.explain_task(p_id bigint)
returns table (
  task_id bigint, state text, reason text, ahead_in_group bigint, ahead bigint, next_look_at timestamptz, worker_id bigint, attempt integer,
  max_attempts integer
)
language plpgsql security definer rows 1 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_task record;
  v_is_long boolean;
  v_workers bigint;
  v_knows boolean;
begin
  select t.* into v_task
  from fairq._shards(null) s(shard_no)
  cross join lateral (
    select k.shard_no, k.id, k.queue, k.group_key, k.kind, k.losses, k.state, k.priority, k.sequence, k.block, k.position, k.run_at, k.expires_at,
      k.worker_id, k.attempt, k.max_attempts, k.concurrency_key, coalesce(k.user_key, '') as user_key
    from fairq.live_tasks k
    where k.shard_no = s.shard_no and k.id = p_id
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
  select count(*), coalesce(bool_or(coalesce(w.kinds ? v_task.kind, true)), true) into v_workers, v_knows
  from fairq.workers w
  where w.shard_no = v_task.shard_no and v_task.queue = any(w.queues);

  if v_task.state in ('overflow', 'queued') then
    -- Not from live_tasks: the index of a group's line needs the condition "not scheduled".
    select count(*) into ahead_in_group from fairq.tasks t
    where t.shard_no = v_task.shard_no and t.queue = v_task.queue and t.group_key = v_task.group_key and t.user_key = v_task.user_key
      and not t.scheduled and (-t.priority, t.sequence) < (-v_task.priority, v_task.sequence)
      and not exists (select from fairq.held h where h.shard_no = v_task.shard_no and h.id = t.id)
      and not exists (
        select from fairq.parked k
        where k.shard_no = v_task.shard_no and k.id = t.id
          and not exists (select from fairq.ready r where r.shard_no = v_task.shard_no and r.id = t.id)
      );
  end if;
  if v_task.state = 'queued' then
    select count(*) into ahead from fairq.ready r
    where r.shard_no = v_task.shard_no and r.queue = v_task.queue and r.position >= 0
      and (r.block, r.position) < (v_task.block, v_task.position)
      and not exists (select from fairq.held h where h.shard_no = v_task.shard_no and h.id = r.id);
  end if;

  if v_task.state in ('scheduled', 'overflow', 'blocked', 'queued') then
    v_is_long := exists (
      select from fairq.parked k where k.shard_no = v_task.shard_no and k.id = p_id and k.concurrency_key = '' and not k.granted
    );
    select w.reason, w.look_at into reason, next_look_at
    from fairq._obstacles(v_task.shard_no, v_task.queue, v_task.group_key, v_task.user_key, case when not v_is_long then v_task.concurrency_key end,
      v_task.state, v_now) w
    order by w.nth limit 1;
  end if;
  if v_is_long and reason is null then
    select format('is expected to be long: %s such tasks have all slots but those kept for short ones', fairq._long_in_flight(v_task.queue)),
      k.long_since + q.short_idle
    into reason, next_look_at
    from fairq.queues q
    left join lateral fairq._tick(v_task.shard_no, q.queue) k on true
    where q.queue = v_task.queue;
  end if;
  reason := case
    when v_task.state = 'claimed' and v_task.losses > 0
      then format('lost with its worker %s times: waits at worker %s to run alone', v_task.losses, v_task.worker_id)
    when v_task.worker_id is not null
      then format('%s by worker %s, attempt %s of %s', v_task.state, v_task.worker_id, v_task.attempt, v_task.max_attempts)
    when v_task.expires_at <= v_now then format('expired at %s, to be ended', v_task.expires_at)
    when not v_knows then format('no live worker of queue "%s" knows the kind "%s"', v_task.queue, v_task.kind)
    when v_task.state = 'scheduled' and v_task.run_at > v_now and v_task.attempt > 0
      then format('waits for its back-off until %s, attempt %s of %s', v_task.run_at, v_task.attempt + 1, v_task.max_attempts)
    when v_task.state = 'scheduled' and v_task.run_at > v_now then format('scheduled at %s', v_task.run_at)
    when reason is not null then reason
    when v_workers = 0 then format('no live worker for queue "%s"', v_task.queue)
    when v_task.state = 'queued' then format('behind %s tasks in order', ahead)
    when v_task.state = 'scheduled' then format('due since %s, waiting for promotion', v_task.run_at)
    when v_task.user_key <> '' then format('behind %s tasks of its user, waiting for promotion', ahead_in_group)
    else format('behind %s tasks of its group, waiting for promotion', ahead_in_group)
  end;
  if exists (
    select from fairq.cancellations c
    where c.shard_no = v_task.shard_no and c.task_id = p_id and (not c.unless_held or v_task.worker_id is null))
  then
    reason := case when v_task.worker_id is null then 'cancelled, to be ended' else reason || ', asked to stop' end;
  end if;
  next_look_at := case when v_task.state = 'scheduled' and v_task.run_at > v_now then v_task.run_at else next_look_at end;
  return next;
end;
$$;
comment on function fairq.explain_task is 'Why a task is not running, and how much comes before it.';

-- What keeps a waiting task from being served now, beside its turn: a paused queue, and the limits of its group, user, key, queue and of the cluster, in the
-- order in which it meets them. Reads the same lanes and the same _allowance as promotion and pop.
create function fairq._obstacles(
  p_shard_no integer, p_queue text, p_group_key text, p_user_key text, p_concurrency_key text, p_state text, p_now timestamptz
) returns table (nth integer, reason text, look_at timestamptz)
language plpgsql stable rows 1 set search_path = pg_catalog, pg_temp as $$
declare
  v_scope record;
  v_lane fairq.lanes;
  v_allowance fairq.allowance;
  v_holders text;
begin
  nth := 1;
  select format('queue "%s" is paused since %s', q.queue, q.paused_at) into reason from fairq.queues q
  where q.queue = p_queue and q.paused_at is not null;
  if found then return next; end if;

  for v_scope in
    values
      (2, p_shard_no, p_queue, p_group_key, format('group "%s"', p_group_key), p_state <> 'queued'),
      (3, p_shard_no, fairq._users_of(p_queue), case when p_user_key is not null then p_group_key end,
        format('user "%s" of group "%s"', p_user_key, p_group_key), p_state <> 'queued'),
      (4, p_shard_no, '#keys', p_concurrency_key, format('concurrency key "%s"', p_concurrency_key), p_state = 'blocked'),
      (5, 0, '#queue ' || p_queue, 'queue ' || p_queue, format('queue "%s"', p_queue), true),
      (6, 0, '#cluster', 'cluster', 'the cluster', true)
  loop
    -- A group without users has no lanes of users.
    continue when v_scope.column4 is null or not v_scope.column6 or v_scope.column1 = 3 and v_lane.inside is not distinct from null;
    -- A key that was not in use for a minute has no lane any more.
    v_lane := case
      when v_scope.column3 = '#keys' then fairq._counter(v_scope.column2, v_scope.column3, v_scope.column4)
      else fairq._lane(v_scope.column2, v_scope.column3, v_scope.column4, case when v_scope.column1 = 3 then p_user_key else '' end)
    end;
    continue when v_lane.policy is null and (v_lane.gate).held_until is null;
    v_allowance := fairq._allowance(v_lane.policy, v_lane.gate, p_now, (v_lane.pace).reserved);
    continue when v_allowance.tasks > 0;
    nth := v_scope.column1;
    look_at := v_allowance.look_at;
    reason := format('%s: %s', v_scope.column5, v_allowance.reason);
    if nth = 2 and exists (
      select from fairq.groups g
      where g.shard_no = p_shard_no and g.queue = p_queue and g.group_key = p_group_key and g.user_key = ''
        and g.paused_at is null and g.leaving_at is not null)
    then
      reason := format('%s moves to another shard, and what it has in flight ends first', v_scope.column5);
    end if;
    if v_scope.column3 = '#keys' then
      select string_agg(h.id::text, ', ' order by h.id) into v_holders
      from (
        select t.id from fairq.live_tasks t
        where t.shard_no = p_shard_no and t.concurrency_key = p_concurrency_key and t.keyed
        limit 5
      ) h;
      reason := format('%s; held by task %s', reason, coalesce(v_holders, 'none'));
    end if;
    return next;
  end loop;
end;
$$;
