-- Ends the waiting tasks among those somebody wished to cancel. Held ones are left: their wish stays, and their holder learns of
-- it with its heartbeat. A queued task that is being popped right now is locked and counts as held.
-- Locks: tasks (overflow rows, which the caller's domain lock protects; queued rows with "skip locked"), cancellations.
create function fairq._cancel_waiting(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ids bigint[];
begin
  select array_agg(w.id) into v_ids
  from (
    select t.id
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.id = any(p_ids)
      and t.worker_id is null
    for update skip locked
  ) w;
  if v_ids is null then
    return 0;
  end if;

  delete from fairq.cancellations c
  where c.shard_no = p_shard_no
    and c.task_id = any(v_ids);
  return fairq._end_tasks(p_shard_no, v_ids, 'cancelled', null, p_now);
end;
$$;
comment on function fairq._cancel_waiting(integer, bigint[], timestamptz) is 'Ends the waiting ones of the tasks to be cancelled.';
