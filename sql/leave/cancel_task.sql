-- Asks to cancel a task, in the caller's transaction: two inserts, and nothing is locked. Once the transaction commits, a waiting task ends as cancelled at the
-- next promotion, which the next pop makes; a running one is told to its worker with the heartbeat.
-- Returns true if the task was live and the caller may ask about its queue.
create function fairq.cancel_task(p_id bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_task record;
begin
  select t.* into v_task from fairq._find_task(p_id) t;
  if not found or not fairq._may_ask(v_task.queue) then return false; end if;
  -- The same wish again within a second adds nothing, and promotion would have to hear each of a thousand.
  if exists (
    select from fairq.cancellations c
    where c.shard_no = v_task.shard_no and c.task_id = p_id and c.requested_at > v_now - interval '1 second' and not c.unless_held
    offset 0)
  then
    return true;
  end if;
  perform fairq._wish_to_cancel(v_task.shard_no, v_task.queue, v_task.group_key, p_id, false);
  return true;
end;
$$;
comment on function fairq.cancel_task is 'Cancels a task when the transaction commits. False: it is not live.';

-- A live task by its id, in whatever shard it is. Without "set search_path", so that it is inlined into the statement that asks.
create function fairq._find_task(p_id bigint) returns table (shard_no integer, queue text, group_key text)
language sql stable rows 1 as $$
  select t.shard_no, t.queue, t.group_key from fairq._shards(null) s(shard_no) cross join lateral fairq._body(s.shard_no, p_id) t
$$;

-- The wish to cancel a task, with its ring, wherever the task may be when the caller commits.
create function fairq._wish_to_cancel(p_shard_no integer, p_queue text, p_group_key text, p_id bigint, p_unless_held boolean) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  with wish as (
    insert into fairq.cancellations (shard_no, task_id, requested_at, unless_held)
    select w.shard_no, p_id, fairq._now(), p_unless_held from fairq._whereabouts(p_shard_no, p_group_key) w(shard_no)
    returning shard_no
  )
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select w.shard_no, p_queue, p_group_key, p_id from wish w;
end;
$$;
