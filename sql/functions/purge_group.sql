-- Cancels everything a group has waiting: overflow, queued, scheduled and blocked tasks. Claimed and running ones are left; cancel_task is for those.
-- Returns how many tasks it ended.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED.
-- Queued ones are cancelled by promotion, which gives the group its addresses back: it owes nothing for tasks it did not run.
-- Locks: the domain, waits for it; the tasks, queued ones with "skip locked". Cost: what the group has waiting, and the scheduled tasks of the queue.
create function fairq.purge_group(p_queue text, p_group_key text) returns integer
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
as $$
declare
  v_shard_no integer;
  v_ctids tid[];
  v_queued bigint[];
  v_ended integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  perform fairq._lock_domain(v_shard_no, p_queue, true);
  v_queued := array(
    select t.id
    from fairq.tasks t
    where t.shard_no = v_shard_no
      and t.queue = p_queue
      and t.group_key = p_group_key
      and t.state = 'queued'
    for update skip locked
  );
  v_ctids := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = v_shard_no
      and t.queue = p_queue
      and t.group_key = p_group_key
      and t.state in ('scheduled', 'overflow', 'blocked')
    for update skip locked
  );
  v_ended := fairq._end_tasks(v_shard_no, v_ctids, 'cancelled', null, fairq._now());
  insert into fairq.cancellations (shard_no, task_id, requested_at)
  select v_shard_no, q.id, fairq._now()
  from unnest(v_queued) q(id);
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select v_shard_no, p_queue, p_group_key, q.id
  from unnest(v_queued) q(id);
  -- One pass hears ten thousand rings and more; others may wait before these.
  for v_round in 1 .. 100 loop
    perform fairq._promote(v_shard_no, p_queue, 1, true);
    exit when not exists (select from fairq._tick(v_shard_no, p_queue) k where fairq._has_news(k));
  end loop;
  return v_ended + cardinality(v_queued);
end;
$$;
comment on function fairq.purge_group(text, text) is 'Cancels everything a group has waiting. Returns how many tasks that were.';
