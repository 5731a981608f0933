-- The one definition of which rings are new: those of transactions at or past the tick's next_xid, and those of transactions that were pending then, are
-- visible now, and were not heard in part before. In the order of their transactions, at most p_limit.
-- Each pending transaction costs one look-up, and only once it has ended: one that holds a million rings and stays open costs nothing. The transaction that
-- promoted last may have rung a million itself: it is stepped over, not walked through.
-- Stable and without "set search_path": it is inlined into the statement that asks, so that rings and snapshot are of one moment.
create function fairq._new_rings(p_tick fairq.ticks, p_limit integer) returns setof fairq.rings
language sql stable as $$
  select r.*
  from (
    select p.xid as first_xid, p.ring_id as first_ring, p.xid as last_xid, 9223372036854775807 as last_ring
    from unnest(p_tick.pending) p
    where pg_visible_in_snapshot(p.xid, pg_current_snapshot())
    union all
    select p_tick.next_xid, 0, p_tick.heard_xid, 0
    union all
    select greatest(p_tick.next_xid, p_tick.heard_xid), case when p_tick.heard_xid >= p_tick.next_xid then p_tick.heard_ring else 0 end,
      '18446744073709551615', 0
  ) x
  cross join lateral (
    select w.*
    from fairq.rings w
    where w.shard_no = p_tick.shard_no and w.queue = p_tick.queue
      and (w.xid, w.ring_id) > (x.first_xid, x.first_ring)
      and (w.xid, w.ring_id) <= (x.last_xid, x.last_ring)
    order by w.xid, w.ring_id
    limit p_limit
  ) r
  limit p_limit
$$;

-- Whether a promotion would find something: a ring, a scheduled task that is due, bodies to announce after a rebuild, a concurrency key that came free. Takes
-- no lock, writes nothing.
-- A worker's turn asks it three times, so the cheap questions come first: nearly always nobody was at work during the last promotion, and no ring is younger.
-- Every other scan is switched off here and not only in the callers: a session keeps the plan that it made when somebody asked without.
create function fairq._has_news(p_tick fairq.ticks) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $$
begin
  if p_tick.next_due_at <= fairq._now() or p_tick.announce_from is not null then
    return true;
  end if;
  if p_tick.pending <> '{}'
    or exists (select from fairq.rings r where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.xid >= p_tick.next_xid)
  then
    if exists (select from fairq._new_rings(p_tick, 1)) then
      return true;
    end if;
  end if;
  if p_tick.keyed then
    return exists (select from fairq._tick(p_tick.shard_no, '#keys') k where fairq._has_news(k));
  end if;
  return false;
end;
$$;

-- Turns the new rings into one row per group, and the tick into one that has heard them. It does nothing else.
-- Exactly once, without deleting or marking a ring: what is visible and what the next tick remembers come from the snapshot of one statement. With two
-- snapshots a ring could be heard twice or never, and a ring that tells of freed places must not be heard twice.
-- The own transaction is a special case: no snapshot lists it as pending, and its id may lie above or below the snapshot's xmax. Its rings are heard up to
-- here, and the tick says up to which.
-- When p_limit rings were read there may be more. Then the tick stops at the last of them, in the middle of a transaction if need be. A pass hears five
-- thousand, because each may bring a lane of its own. If they come from few groups, such as ten thousand tasks that one tenant created one by one, it hears
-- four times as many, so that those behind them are heard as well.
-- Cost: p_limit entries of rings_xid_idx.
create function fairq._hear(
  p_tick fairq.ticks, p_limit integer, out o_tick fairq.ticks, out o_news fairq.news[], out o_cancelled bigint[], out o_configured boolean
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_own xid8 := pg_current_xact_id();
  v_own_ring bigint;
  v_snapshot pg_snapshot;
  v_count integer;
  v_last_xid xid8;
  v_last_ring bigint;
  v_due_at timestamptz;
  v_keyed boolean;
  v_users boolean;
  v_again record;
begin
  with ring as materialized (
    select r.* from fairq._new_rings(p_tick, p_limit) r
  ),
  news as (
    select r.group_key, r.user_key, sum(r.freed)::integer as freed,
      array_agg(r.ring_id) filter (where r.failures > 0) as failed_at, array_agg(r.failures) filter (where r.failures > 0) as failed,
      max(r.ring_id) filter (where r.succeeded) as last_success,
      bool_or(r.succeeded) as succeeded, bool_or(r.keyed) as keyed, bool_or(r.configured) as configured, min(r.sequence) as first_sequence,
      case
        when min(r.priority) = max(r.priority)
          then array[(min(r.priority), min(r.sequence) filter (where r.priority is not null), null, false)::fairq.cursor]
        when min(r.priority) is not null
          then nullif(array[(0, min(r.sequence) filter (where r.priority = 0), null, false)::fairq.cursor], array[(0, null, null, false)::fairq.cursor])
            || array_agg((r.priority, r.sequence, null, false)::fairq.cursor) filter (where r.priority <> 0)
        -- A task that was given a place of its key is not in line: a cursor behind everything says that there is something.
        when min(r.sequence) is not null then array[(-1000000, 9223372036854775807, null, false)::fairq.cursor]
      end as heard,
      sum(r.used) as used, sum(r.charged) as charged, sum(r.used - r.charged) filter (where r.charged > 0) as correction,
      array_agg(r.ran) filter (where (r.ran).kind is not null) as ran,
      -- The latest, in microseconds, and the task that said so.
      max(case when r.hold_until is not null then array[(extract(epoch from r.hold_until) * 1000000)::bigint, r.held_by] end) as hold
    from ring r
    where r.due_at is null
    group by r.group_key, r.user_key
  )
  select pg_current_snapshot(), r.*, case when r.count >= p_limit then (select max(g.ring_id) from ring g where g.xid = r.last_xid) end, n.*
  into v_snapshot, v_count, v_last_xid, v_own_ring, v_due_at, o_cancelled, v_last_ring, o_news, v_keyed, v_users, o_configured
  from (
    select count(*)::integer, max(g.xid) as last_xid, max(g.ring_id) filter (where g.xid = v_own), min(g.due_at),
      array_agg(g.cancelled_id) filter (where g.cancelled_id is not null)
    from ring g
  ) r
  cross join (
    select array_agg((w.group_key, w.freed,
        -- Failures before a success do not count.
        case
          when w.failed is null then 0
          else (select coalesce(sum(f.tasks), 0)::integer from unnest(w.failed_at, w.failed) f(ring_id, tasks) where f.ring_id >= coalesce(w.last_success, 0))
        end, w.succeeded, w.keyed, w.configured, w.first_sequence, w.heard, w.used,
        w.charged, w.correction, w.ran, w.hold, w.user_key, null, null, null, null)::fairq.news),
      bool_or(w.keyed), bool_or(w.user_key is not null), bool_or(w.configured)
    from news w
  ) n;
  if v_count = 5000 and p_limit = 5000 and cardinality(o_news) < 500 then
    v_again := fairq._hear(p_tick, 20000);
    o_tick := v_again.o_tick;
    o_news := v_again.o_news;
    o_cancelled := v_again.o_cancelled;
    o_configured := v_again.o_configured;
    return;
  end if;

  o_tick := p_tick;
  o_tick.keyed := p_tick.keyed or coalesce(v_keyed, false);
  o_tick.users := p_tick.users or coalesce(v_users, false);
  o_tick.next_due_at := least(p_tick.next_due_at, v_due_at);
  v_own_ring := coalesce(v_own_ring, case when p_tick.heard_xid = v_own then p_tick.heard_ring end,
    (select p.ring_id from unnest(p_tick.pending) p where p.xid = v_own), 0);

  if v_count >= p_limit and v_last_xid < p_tick.next_xid then
    -- The cut is among the transactions that were pending: those behind it, and those still running, stay pending.
    o_tick.pending := array(
      select (p.xid, case p.xid when v_last_xid then v_last_ring when v_own then v_own_ring else p.ring_id end)::fairq.heard
      from unnest(p_tick.pending) p
      where p.xid >= v_last_xid
        or p.xid = v_own
        or not pg_visible_in_snapshot(p.xid, v_snapshot)
      order by p.xid
    );
    return;
  end if;

  if v_count >= p_limit then
    -- Never past the snapshot's xmax, see below: only the own transaction can lie there.
    o_tick.next_xid := least((v_last_xid::text::bigint + 1)::text::xid8, pg_snapshot_xmax(v_snapshot));
    if v_last_xid >= o_tick.next_xid then
      o_tick.heard_xid := v_last_xid;
      o_tick.heard_ring := v_last_ring;
    elsif p_tick.heard_xid < o_tick.next_xid then
      o_tick.heard_xid := '0';
      o_tick.heard_ring := 0;
    end if;
  else
    -- Never past the snapshot's xmax: the own transaction may lie beyond it, and between the two may be others that nobody lists as pending.
    o_tick.next_xid := pg_snapshot_xmax(v_snapshot);
    v_last_xid := null;
    o_tick.heard_xid := case when v_own >= o_tick.next_xid then v_own else '0' end;
    o_tick.heard_ring := case when v_own >= o_tick.next_xid then v_own_ring else 0 end;
  end if;
  o_tick.pending := array(
    select (p.xid, case p.xid when v_last_xid then v_last_ring when v_own then v_own_ring else 0 end)::fairq.heard
    from (select pg_snapshot_xip(v_snapshot) union select v_own union select v_last_xid) p(xid)
    where p.xid < o_tick.next_xid
    order by p.xid
  );
end;
$$;
