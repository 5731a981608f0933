-- Appends a tick. Inside a savepoint the row's xmin is the subtransaction's, which only the row itself can tell:
-- then written_by is corrected at once, or the next reader would take the tick for a restored one. ("returning xmin" would be shorter, and fails
-- where the table is partitioned.)
create function fairq._write_tick(p_tick fairq.ticks) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  insert into fairq.ticks as t (shard_no, queue, tick, created_at, clock, clock_position, newcomer_position, top, horizon, horizon_position,
    refill_block, refill_position,
    next_xid, pending, heard_xid, heard_ring, next_due_at, lane_count, filled, keyed)
  values (p_tick.shard_no, p_tick.queue, p_tick.tick, p_tick.created_at, p_tick.clock, p_tick.clock_position, p_tick.newcomer_position, p_tick.top,
    p_tick.horizon, p_tick.horizon_position, p_tick.refill_block, p_tick.refill_position, p_tick.next_xid, p_tick.pending, p_tick.heard_xid,
    p_tick.heard_ring, p_tick.next_due_at, p_tick.lane_count, p_tick.filled, p_tick.keyed);

  update fairq.ticks t
  set written_by = t.xmin
  where t.shard_no = p_tick.shard_no
    and t.queue = p_tick.queue
    and t.tick = p_tick.tick
    and t.written_by <> t.xmin;
end;
$$;
comment on function fairq._write_tick(fairq.ticks) is 'Appends a tick.';
