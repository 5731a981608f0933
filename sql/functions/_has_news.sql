-- Whether a promotion would find something: a ring it has not heard, its own or a concurrency key's, or a scheduled task that is due. Takes no lock, writes nothing.
-- A pending transaction is looked up only once it has ended, so one that holds a million rings and stays open costs nothing.
-- The transaction that promoted last is a case of its own: what it rang before that may be a million rings, and is stepped over.
-- "offset 0" keeps the planner from joining the pending transactions with all rings there are.
-- Cost: a few entries of rings_xid_idx, one more per pending transaction that ended.
create function fairq._has_news(p_tick fairq.ticks) returns boolean
language plpgsql
volatile
set search_path = ''
as $$
begin
  return coalesce(p_tick.next_due_at <= fairq._now(), false)
    or exists (
      select
      from fairq.rings r
      where r.shard_no = p_tick.shard_no
        and r.queue = p_tick.queue
        and r.xid >= p_tick.next_xid
        and r.xid < p_tick.heard_xid
    )
    or exists (
      select
      from fairq.rings r
      where r.shard_no = p_tick.shard_no
        and r.queue = p_tick.queue
        and r.xid >= p_tick.next_xid
        and r.xid > p_tick.heard_xid
    )
    or exists (
      select
      from fairq.rings r
      where r.shard_no = p_tick.shard_no
        and r.queue = p_tick.queue
        and r.xid = p_tick.heard_xid
        and r.ring_id > p_tick.heard_ring
    )
    or exists (
      select
      from unnest(p_tick.pending) p(xid)
      where p.xid <> p_tick.heard_xid
        and pg_visible_in_snapshot(p.xid, pg_current_snapshot())
        and exists (
          select
          from fairq.rings r
          where r.shard_no = p_tick.shard_no
            and r.queue = p_tick.queue
            and r.xid = p.xid
          offset 0
        )
    )
    -- A concurrency key that was freed may let tasks of this queue go on.
    or (p_tick.keyed and exists (
      select from fairq._tick(p_tick.shard_no, '#keys') k where fairq._has_news(k)
    ));
end;
$$;
comment on function fairq._has_news(fairq.ticks) is 'Whether there are rings not heard yet, or scheduled tasks due.';
