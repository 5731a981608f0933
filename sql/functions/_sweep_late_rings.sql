-- Rings of transactions that were still open when the sweep of rings passed them: remembered here, by id, and removed when a tick has heard them.
-- Returns how many rings it removed.
create function fairq._sweep_late_rings(p_shard_no integer, p_queue text, p_tick fairq.ticks, p_passed bigint)
returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_what text := 'late rings ' || p_queue;
  v_open bigint[] := array(
    select x.id
    from (
      select p.xid::text::bigint from unnest(p_tick.pending) p(xid)
      union
      select p_tick.heard_xid::text::bigint
    ) x(id)
    where x.id <= p_passed
  );
  v_done bigint[];
begin
  insert into fairq.sweeps (shard_no, what, floor)
  select p_shard_no, v_what, o.id
  from unnest(v_open) o(id)
  on conflict do nothing;

  v_done := array(
    select w.floor
    from fairq.sweeps w
    where w.shard_no = p_shard_no
      and w.what = v_what
      and w.floor < p_tick.next_xid::text::bigint
      and w.floor <> p_tick.heard_xid::text::bigint
      and w.floor::text::xid8 <> all(p_tick.pending)
    order by w.floor
    limit 1000
  );
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what = v_what and w.floor = any(v_done);
  return fairq._remove(p_shard_no, 'rings', array(
    select r.ctid
    from unnest(v_done) d(xid)
    cross join lateral (
      select k.ctid
      from fairq.rings k
      where k.shard_no = p_shard_no
        and k.queue = p_queue
        and k.xid = d.xid::text::xid8
      offset 0
    ) r
  ));
end;
$$;
comment on function fairq._sweep_late_rings(integer, text, fairq.ticks, bigint) is 'Removes rings of transactions that were open when the sweep passed them.';
