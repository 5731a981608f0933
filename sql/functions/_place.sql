-- Gives waiting tasks their addresses: overflow -> queued. By ctid and no other way, see _hold.
-- Locks: tasks, the rows named; the caller holds the domain.
create function fairq._place(p_shard_no integer, p_ctids tid[], p_blocks bigint[], p_positions bigint[], p_counted boolean[], p_charges double precision[]) returns integer
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
  update fairq.tasks t
  set state = 'queued', block = m.block, position = m.position, counted = m.counted, charge = m.charge
  from unnest(p_ctids, p_blocks, p_positions, p_counted, p_charges) as m(ctid, block, position, counted, charge)
  where t.shard_no = p_shard_no
    and t.ctid = m.ctid;
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;
comment on function fairq._place(integer, tid[], bigint[], bigint[], boolean[], double precision[]) is 'Gives waiting tasks their addresses.';
