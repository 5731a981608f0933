-- Cancels everything a group has waiting: overflow, queued, scheduled and blocked tasks. Claimed and running ones are left; cancel_task is for those.
-- Returns how many tasks it ended.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED.
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
begin
  perform fairq._check_group(p_queue, p_group_key);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  perform fairq._lock_domain(v_shard_no, p_queue, true);
  v_ctids := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = v_shard_no
      and t.queue = p_queue
      and t.group_key = p_group_key
      and t.worker_id is null
    for update skip locked
  );
  return fairq._end_tasks(v_shard_no, v_ctids, 'cancelled', null, fairq._now());
end;
$$;
comment on function fairq.purge_group(text, text) is 'Cancels everything a group has waiting. Returns how many tasks that were.';
