-- Takes queued tasks, which the caller has locked, out of the order: queued -> overflow. Their concurrency keys are free; the
-- places of their group the caller gives back itself. By ctid and no other way, see _hold.
create function fairq._unplace(p_shard_no integer, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  with unplaced as (
    update fairq.tasks t
    set state = 'overflow', block = null, position = null, counted = false
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
    returning t.concurrency_key
  )
  insert into fairq.rings (shard_no, queue, group_key, freed)
  select p_shard_no, '#keys', u.concurrency_key, count(*)
  from unplaced u
  where u.concurrency_key is not null
  group by u.concurrency_key;
end;
$$;
comment on function fairq._unplace(integer, tid[]) is 'Takes queued tasks out of the order.';
