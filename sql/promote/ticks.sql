-- The newest tick of a domain; no row when there is none, or when it was written in another life of the database. A restored dump keeps written_by but gets new
-- row headers, so xmin tells; the stored horizon would mean nothing then.
-- Cost: one entry of ticks_pkey, read backwards, however many dead ticks lie before it.
create function fairq._tick(p_shard_no integer, p_queue text) returns setof fairq.ticks
language sql stable as $$
  select n.shard_no, n.written_by, n.tick, n.clock, n.clock_position, n.newcomer_position, n.top, n.horizon, n.horizon_position, n.refill_block,
    n.refill_position, n.next_xid, n.heard_xid, n.heard_ring, n.next_due_at, n.lane_count, n.touched, n.first_version, n.announce_from, n.filled,
    n.keyed, n.long_since, n.long_turn, n.long_top, n.users, n.queue, n.pending
  from (
    select t.*, t.xmin as row_xmin
    from fairq.ticks t
    where t.shard_no = p_shard_no and t.queue = p_queue
    order by t.tick desc
    limit 1
  ) n
  where n.row_xmin = n.written_by
$$;

-- Appends a tick, the next one after the one given. Inside a savepoint the row's xmin is the subtransaction's, which only the row itself can tell. Then
-- written_by is corrected at once, or the next reader would take the tick for a restored one. ("returning xmin" would be shorter, but fails where the table is
-- partitioned.)
-- Returns the tick as it was written.
create function fairq._write_tick(p_tick fairq.ticks) returns fairq.ticks
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  p_tick.tick := p_tick.tick + 1;
  p_tick.written_by := pg_current_xact_id()::xid;
  insert into fairq.ticks select (p_tick).*;
  update fairq.ticks t
  set written_by = t.xmin
  where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.tick = p_tick.tick
    and t.written_by <> t.xmin;
  return p_tick;
end;
$$;
