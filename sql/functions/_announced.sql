-- Whether workers have been told by NOTIFY of something in this domain that no promotion has heard yet. Another NOTIFY would tell them nothing, and it is dear: it
-- takes a database-wide lock that is held until the commit is on disk, so all who notify commit one after the other.
-- A promotion that is under way may hear that ring and not the caller's. So NOTIFY is a hint: whoever sleeps looks again a few milliseconds
-- after it last found something, then after pauses that double (see the worker). Of a transaction open for as long it learns about as much later.
-- Only in READ COMMITTED: an older snapshot knows nothing of what was heard since, and what SERIALIZABLE reads here would make enqueuers fail for each other.
-- One look-up each in ticks and rings: of an open transaction one ring is announced at most, however many it has.
-- Stable, without "set search_path": inlined into the statement that asks.
create function fairq._announced(p_shard_no integer, p_queue text) returns table (is_announced boolean)
language sql
stable
rows 1
as $$
  select case
    when current_setting('transaction_isolation') <> 'read committed' then false
    else exists (
      select
      from (values (1)) one
      left join lateral (
        select t.next_xid, t.heard_xid
        from fairq.ticks t
        where t.shard_no = p_shard_no
          and t.queue = p_queue
        order by t.tick desc
        limit 1
      ) k on true
      cross join lateral (
        select
        from fairq.rings r
        where r.shard_no = p_shard_no
          and r.queue = p_queue
          and r.announced
          and r.xid >= coalesce(k.next_xid, '0')
          and r.xid <> coalesce(k.heard_xid, '0')
        limit 1
      ) r
    )
  end
$$;
comment on function fairq._announced(integer, text) is 'Whether a NOTIFY has been sent that no promotion has heeded yet.';
