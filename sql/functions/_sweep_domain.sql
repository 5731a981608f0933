-- Removes what promotion has left behind in a domain: rings every later tick would ignore, ticks but the last, lanes of groups that are idle and
-- whose turn is used up (they would start at the clock anyway). At most p_limit of each.
-- Returns how many rows it removed.
-- enable_sort is off: the rows come in the order of an index, and another index with a sort behind it would read all of them.
-- Locks: the rows it removes; the caller holds the domain.
create function fairq._sweep_domain(p_shard_no integer, p_queue text, p_limit integer) returns integer
language plpgsql
volatile
set search_path = ''
set enable_sort = off
as $$
declare
  v_tick fairq.ticks;
  v_floor bigint;
  v_rings record;
  v_late integer;
  v_ticks record;
  v_lanes record;
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if not found then
    return 0;
  end if;

  -- Rings of transactions that were open when a sweep passed them are named in fairq.sweeps, and removed once they are heard: the floor
  -- does not wait for the longest transaction.
  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'rings ' || p_queue), 0);
  with heard as materialized (
    select r.ctid, r.xid
    from fairq.rings r
    where r.shard_no = p_shard_no
      and r.queue = p_queue
      and r.xid >= v_floor::text::xid8
      and r.xid < v_tick.next_xid
      and r.xid <> v_tick.heard_xid
      and r.xid <> all(v_tick.pending)
    order by r.xid
    limit p_limit
  )
  select count(*)::integer as swept, array_agg(h.ctid) as ctids, max(h.xid::text::bigint) as last into v_rings from heard h;
  perform fairq._remove(p_shard_no, 'rings', v_rings.ctids);
  v_late := fairq._sweep_late_rings(p_shard_no, p_queue, v_tick, v_rings.last);
  perform fairq._set_sweep_floor(p_shard_no, 'rings ' || p_queue, v_rings.last);

  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'ticks ' || p_queue), 0);
  with old as materialized (
    select k.ctid, k.tick
    from fairq.ticks k
    where k.shard_no = p_shard_no
      and k.queue = p_queue
      and k.tick >= v_floor
      and k.tick < v_tick.tick
    order by k.tick
    limit p_limit
  )
  select count(*)::integer as swept, array_agg(o.ctid) as ctids, max(o.tick) as last into v_ticks from old o;
  perform fairq._remove(p_shard_no, 'ticks', v_ticks.ctids);
  perform fairq._set_sweep_floor(p_shard_no, 'ticks ' || p_queue, v_ticks.last);

  -- A rate that is not paid for keeps its lane for now, and the floor before it: the lane does not ring when it is. One whose breaker has
  -- counted failures stays until the group succeeds; that rings.
  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'lanes ' || p_queue), 0);
  with idle as materialized (
    select l.ctid, l.finish, coalesce((l.gate).rate_at, '-infinity') <= fairq._now() as is_paid
    from fairq.lanes l
    where l.shard_no = p_shard_no
      and l.queue = p_queue
      and not l.admissible
      -- A meter is asked without looking at the settings: its lane is never missing.
      and l.queue <> '#meters'
      and l.finish >= v_floor
      and l.finish <= v_tick.clock
      and l.cursors = '{}'
      and (l.gate is null or (l.gate).in_flight = 0 and (l.gate).open_until is null and coalesce((l.gate).failures, 0) = 0)
    order by l.finish
    limit p_limit
  )
  select count(*) filter (where i.is_paid)::integer as swept, array_agg(i.ctid) filter (where i.is_paid) as ctids,
    coalesce(min(i.finish) filter (where not i.is_paid), max(i.finish)) as last
  into v_lanes
  from idle i;
  perform fairq._remove(p_shard_no, 'lanes', v_lanes.ctids);
  perform fairq._set_sweep_floor(p_shard_no, 'lanes ' || p_queue, v_lanes.last);

  return v_rings.swept + v_late + v_ticks.swept + v_lanes.swept;
end;
$$;
comment on function fairq._sweep_domain(integer, text, integer) is 'Removes rings, ticks and lanes that nobody needs any more.';
