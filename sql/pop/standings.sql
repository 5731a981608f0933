-- How far queues have come. This is for a consumer of several databases that gives their groups the same share: it asks the one first whose address has moved
-- least. Addresses of different databases or queues have no common beginning; a round of a group of weight 1 is 2^20 everywhere.
-- Returns for each queue the block of its next task, ready or not, in the shard that has come least far; null: nothing is in line.
-- Locks: none. Cost: as _standings.
create function fairq.standings(p_queues text[]) returns bigint[]
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
begin
  return array(
    select s.o_floor
    from unnest(p_queues) with ordinality q(queue, place)
    cross join lateral fairq._standings(q.queue) s
    order by q.place
  );
end;
$$;
comment on function fairq.standings is 'How far queues have come: the block of the next task of each.';
