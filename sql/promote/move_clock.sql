-- The clock moves to the address of the first task that is still ready or still waits. A pop in flight counts as ready, so what it puts back lies at or after
-- the clock. With nothing left the clock goes to the end of the busy period, the highest finish tag, so that nobody pays for the past; and if other shards have
-- come further, to p_floor, so that nobody gains from it.
-- clock_position is the lower bound of scans inside the block. It lies right after the lane before the next one, so the dead rows of lanes already served lie
-- behind it. Newcomers get the positions in between, one after the other.
create function fairq._move_clock(p_tick fairq.ticks, p_block bigint, p_position bigint, p_floor bigint default null) returns fairq.ticks
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_is_same_block boolean;
begin
  if p_block is null or (p_tick.horizon, p_tick.horizon_position) < (p_block, p_position) then
    p_block := p_tick.horizon;
    p_position := p_tick.horizon_position;
  end if;
  if p_block is null then
    p_block := greatest(p_tick.clock, p_tick.top);
    p_block := p_block + coalesce(greatest(0, fairq._ahead(p_floor, p_block)), 0);
    p_position := case when p_block = p_tick.clock then p_tick.clock_position else 1 end;
  end if;
  -- Groups whose long tasks wait for a slot are neither ready nor at the horizon, and one short task of somebody else would cost them their turns. So the clock
  -- waits for the turn that had a slot last, but only as far as groups that had one lie apart. If it waited longer, groups with only long tasks would come with
  -- a flood.
  if p_tick.long_since is not null and p_block > p_tick.long_turn then
    p_block := greatest(p_tick.clock, p_tick.long_turn, p_block - (p_tick.long_top - p_tick.long_turn));
    p_position := case when p_block = p_tick.clock then p_tick.clock_position else 1 end;
  end if;

  v_is_same_block := p_block = p_tick.clock;
  p_tick.clock := p_block;
  p_tick.clock_position := case
    when p_position = fairq._lane_position(p_position >> 20) then greatest(1, p_position - 1048575)
    else p_position
  end;
  p_tick.newcomer_position := case
    when v_is_same_block then greatest(p_tick.newcomer_position, p_tick.clock_position - 1)
    else p_tick.clock_position - 1
  end;
  return p_tick;
end;
$$;

-- How far a clock is ahead of that of another shard. Each may have been taken back once more than the other.
create function fairq._ahead(p_block bigint, p_other bigint) returns bigint
language sql immutable parallel safe
as $$ select ((p_block - p_other + 288230376151711744) & 576460752303423487) - 288230376151711744 $$;

-- Takes the clock back by 2^60 long before a bigint is full. Blocks, finish tags and the tick move by the same distance, so the order stays as it is. With
-- tasks of cost 1 that is after 2^41 rounds; with bytes for costs it may happen in a few years.
-- Pops that read the tick before find nothing and look again.
-- Returns the tick, not yet written.
-- Locks: ready (a pop in flight is waited for); lanes; the caller holds the domain.
-- Cost: the ready set and all lanes of the domain.
create function fairq._rebase(p_tick fairq.ticks, p_distance bigint) returns fairq.ticks
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  update fairq.ready t
  set block = t.block - p_distance
  where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.position >= 0;
  update fairq.lanes l
  set finish = greatest(0, l.finish - p_distance),
    pace = case when l.pace is distinct from null then ((l.pace).last_block - p_distance, (l.pace).credit, (l.pace).estimates, (l.pace).unit, (l.pace).reserved)::fairq.pace end
  where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue;
  update fairq.parked k
  set turn = greatest(0, k.turn - p_distance)
  where k.shard_no = p_tick.shard_no and k.queue = p_tick.queue and k.concurrency_key = '' and k.turn is not null;
  delete from fairq.sweeps w where w.shard_no = p_tick.shard_no and w.what = 'lanes ' || p_tick.queue;

  p_tick.clock := p_tick.clock - p_distance;
  p_tick.top := p_tick.top - p_distance;
  p_tick.horizon := p_tick.horizon - p_distance;
  p_tick.refill_block := p_tick.refill_block - p_distance;
  p_tick.long_turn := greatest(0, p_tick.long_turn - p_distance);
  p_tick.long_top := greatest(0, p_tick.long_top - p_distance);
  return p_tick;
end;
$$;
