-- The newest tick of a domain; nothing when there is none, or when it was written in another life of the database.
-- A restored dump keeps written_by but gets new row headers, so xmin tells; the stored horizon means nothing then.
-- Cost: one entry of ticks_pkey, read backwards, however many dead ticks lie before it.
create function fairq._tick(p_shard_no integer, p_queue text) returns setof fairq.ticks
language sql
stable
as $$
  select n.shard_no, n.written_by, n.tick, n.created_at, n.clock, n.clock_position, n.newcomer_position, n.top, n.horizon, n.horizon_position,
    n.refill_block, n.refill_position,
    n.next_xid, n.heard_xid, n.heard_ring, n.next_due_at, n.lane_count, n.filled, n.keyed, n.queue, n.pending
  from (
    select t.*, t.xmin as row_xmin
    from fairq.ticks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue
    order by t.tick desc
    limit 1
  ) n
  where n.row_xmin = n.written_by
$$;
comment on function fairq._tick(integer, text) is 'The newest tick of a domain, if it can be trusted.';
