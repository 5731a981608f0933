-- Deletes rows of the engine's own notes: lanes that were replaced, rings, ticks, keys and wishes that nobody needs any more. By ctid and no
-- other way, see _hold.
-- Returns how many rows it deleted.
-- Locks: the rows named; the caller holds what protects them.
create function fairq._remove(p_shard_no integer, p_table text, p_ctids tid[]) returns integer
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_count integer;
begin
  case p_table
    when 'lanes' then delete from fairq.lanes r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'rings' then delete from fairq.rings r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'ticks' then delete from fairq.ticks r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'cancellations' then delete from fairq.cancellations r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'watches' then delete from fairq.watches r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'progress' then delete from fairq.progress r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'idempotency_keys' then delete from fairq.idempotency_keys r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
  end case;
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;
comment on function fairq._remove(integer, text, tid[]) is 'Deletes rows of the engine''s notes.';
