-- Takes the clock back to zero long before a bigint is full: blocks, finish tags and the tick move by the same distance, so the order stays as it is. With tasks of
-- cost 1 that is after 2^41 rounds; with bytes for costs it may happen in a few years.
-- Pops that read the tick before find nothing and look again.
-- Returns the tick, not yet written.
-- Locks: tasks, queued rows (a pop in flight is waited for); lanes; the caller holds the domain.
-- Cost: the ready set and all lanes of the domain.
create function fairq._rebase(p_tick fairq.ticks, p_clock bigint) returns fairq.ticks
language plpgsql
volatile
set search_path = ''
as $$
begin
  update fairq.tasks t
  set block = t.block - p_clock
  where t.shard_no = p_tick.shard_no
    and t.queue = p_tick.queue
    and t.state = 'queued';
  update fairq.lanes l
  set finish = greatest(0, l.finish - p_clock),
    pace = case when l.pace is distinct from null then ((l.pace).last_block - p_clock, (l.pace).credit, (l.pace).estimates)::fairq.pace end
  where l.shard_no = p_tick.shard_no
    and l.queue = p_tick.queue;
  delete from fairq.sweeps w where w.shard_no = p_tick.shard_no and w.what = 'lanes ' || p_tick.queue;

  p_tick.clock := 0;
  p_tick.top := p_tick.top - p_clock;
  p_tick.horizon := p_tick.horizon - p_clock;
  p_tick.refill_block := p_tick.refill_block - p_clock;
  return p_tick;
end;
$$;
comment on function fairq._rebase(fairq.ticks, bigint) is 'Takes the clock of a domain back to zero.';
