-- Asks for a notice on the channel fairq_done when a task ends, in whatever way. LISTEN first, then call this, then look whether the task is still live: if you
-- looked first, it might end unheard between the two. To wait for longer than p_for, call it again in time.
-- It holds from the commit of this transaction on: call it in a transaction of its own, and wait outside of any.
-- Returns true when the task is live, and not in a queue of other roles.
-- Raises QF009 a time that is not positive, or longer than an hour. Locks: none; one insert.
create function fairq.watch_task(p_id bigint, p_for interval default '1 minute') returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_task record;
  v_until timestamptz;
begin
  perform fairq._check_length('the time to watch a task', coalesce(p_for, interval '0'), interval '1 hour');
  v_until := fairq._now() + p_for;
  select t.* into v_task from fairq._find_task(p_id) t;
  if not found or not fairq._may_ask(v_task.queue) then return false; end if;
  -- A watch that hardly extends another one is not written: nobody can fill the table by asking again and again.
  insert into fairq.watches (shard_no, task_id, until)
  select a.shard_no, p_id, v_until from fairq._whereabouts(v_task.shard_no, v_task.group_key) a(shard_no)
  where not exists (
    select from fairq.watches w where w.shard_no = v_task.shard_no and w.task_id = p_id and w.until > v_until - interval '1 second' offset 0);
  return true;
end;
$$;
comment on function fairq.watch_task is 'Asks for a notice on the channel fairq_done when a task ends. False: it is not live.';
