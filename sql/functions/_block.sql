-- Waiting tasks whose concurrency key is taken: overflow -> blocked. By ctid and no other way, see _hold.
-- Locks: tasks, the rows named; the caller holds the domain.
create function fairq._block(p_shard_no integer, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  if p_ctids <> '{}' then
    update fairq.tasks t
    set state = 'blocked'
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids);
  end if;
end;
$$;
comment on function fairq._block(integer, tid[]) is 'Takes tasks whose concurrency key is taken out of the line.';
