-- The clock moves to the address of the first task still queued or still waiting, whichever is first. A pop in flight counts as queued, so what it puts back
-- lies at or after the clock. With nothing left the clock goes to the end of the busy period, the highest finish tag, so nobody pays for the past.
-- clock_position is the lower bound of scans inside the block: right after the lane before the next one, so the dead rows of the lanes already
-- served lie behind it; newcomers get the positions in between, one after the other.
create function fairq._move_clock(p_tick fairq.ticks, p_block bigint, p_position bigint) returns fairq.ticks
language plpgsql
immutable
set search_path = ''
as $$
declare
  v_is_same_block boolean;
begin
  if p_block is null or (p_tick.horizon, p_tick.horizon_position) < (p_block, p_position) then
    p_block := p_tick.horizon;
    p_position := p_tick.horizon_position;
  end if;
  if p_block is null then
    p_block := greatest(p_tick.clock, p_tick.top);
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
comment on function fairq._move_clock(fairq.ticks, bigint, bigint) is 'Moves the clock to the first task that is queued or waits.';
