-- Ends the waiting tasks among those somebody wished to cancel. Held ones are left: their wish stays, and their holder learns of
-- it with its heartbeat. A queued task that is being popped right now is locked and counts as held.
-- "offset 0": as joins, each of these look-ups could become a walk through all wishes there ever were.
-- Locks: tasks (overflow rows, which the caller's domain lock protects; queued rows with "skip locked"), cancellations.
create function fairq._cancel_waiting(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ids bigint[];
  v_ctids tid[];
begin
  select array_agg(w.id), array_agg(w.ctid) into v_ids, v_ctids
  from (
    select t.id, t.ctid
    from (select distinct i.id from unnest(p_ids) i(id)) i
    cross join lateral (
      select n.id, n.ctid
      from fairq.tasks n
      where n.shard_no = p_shard_no
        and n.id = i.id
        and n.worker_id is null
        -- retry_task withdraws the wish, not the ring.
        and exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = n.id offset 0)
      for update skip locked
      offset 0
    ) t
  ) w;
  -- One that is being popped is locked; should the pop roll back it would be waiting again.
  perform fairq._ring_wishes(p_shard_no, array(select i.id from unnest(p_ids) i(id) where i.id <> all(coalesce(v_ids, '{}'))));
  if v_ids is null then
    return 0;
  end if;

  perform fairq._remove(p_shard_no, 'cancellations', array(
    select w.ctid
    from unnest(v_ids) i(id)
    cross join lateral (
      select c.ctid
      from fairq.cancellations c
      where c.shard_no = p_shard_no
        and c.task_id = i.id
      offset 0
    ) w
  ));
  return fairq._end_tasks(p_shard_no, v_ctids, 'cancelled', null, p_now);
end;
$$;
comment on function fairq._cancel_waiting(integer, bigint[], timestamptz) is 'Ends the waiting ones of the tasks to be cancelled.';
