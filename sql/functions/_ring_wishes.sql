-- Tasks that come back in line although somebody wished to cancel them: the wish is rung again, since the ring that told of it was heard while the task
-- was held.
create function fairq._ring_wishes(p_shard_no integer, p_ids bigint[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = on
as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select p_shard_no, t.queue, t.group_key, t.id
  from unnest(p_ids) i(id)
  cross join lateral (
    select k.id, k.queue, k.group_key
    from fairq.tasks k
    where k.shard_no = p_shard_no
      and k.id = i.id
      and k.worker_id is null
      and exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = i.id offset 0)
    offset 0
  ) t;
end;
$$;
comment on function fairq._ring_wishes(integer, bigint[]) is 'Rings again for tasks to be cancelled that came back in line.';
