-- Takes queued tasks, which the caller has locked, out of the order: queued -> overflow. By ctid and no other way, see _hold.
create function fairq._unplace(p_shard_no integer, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  update fairq.tasks t
  set state = 'overflow', block = null, position = null, counted = false
  where t.shard_no = p_shard_no
    and t.ctid = any(p_ctids);
end;
$$;
comment on function fairq._unplace(integer, tid[]) is 'Takes queued tasks out of the order.';
