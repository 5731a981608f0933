-- Scheduled tasks become overflow, in the order given, behind what their groups have waiting, and ring. By ctid and no other way, see _hold.
-- Locks: tasks, the rows named; the caller holds the domain.
create function fairq._wake(p_shard_no integer, p_queue text, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  with numbered as materialized (
    select d.ctid, nextval('fairq.task_ids') as sequence from unnest(p_ctids) d(ctid)
  ),
  woken as (
    update fairq.tasks t
    set state = 'overflow', sequence = n.sequence
    from numbered n
    where t.shard_no = p_shard_no
      and t.ctid = n.ctid
    returning t.group_key, t.priority, t.sequence, t.concurrency_key
  )
  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
  select p_shard_no, p_queue, w.group_key, w.priority, min(w.sequence), bool_or(w.concurrency_key is not null)
  from woken w
  group by w.group_key, w.priority;
end;
$$;
comment on function fairq._wake(integer, text, tid[]) is 'Moves scheduled tasks to overflow.';
