-- Caps, rates and breakers of a whole queue and of the cluster, asked at pop: how many tasks may be popped now. Takes the lock of #meters, so pops of such
-- queues go one after the other; other queues never come here.
-- Hears first what left since, so what it says is exact.
-- Returns at most p_limit.
-- Raises QF015: claim leases and a cluster cap exclude each other.
-- Locks: the domain #meters, waits for it; until the transaction ends.
create function fairq._meter(p_queue text, p_limit integer, p_now timestamptz, p_claim_lease interval) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_lane fairq.lanes;
  v_scope text;
  v_tick fairq.ticks;
begin
  perform fairq._lock_domain(0, '#meters', true);
  select k.* into v_tick from fairq._tick(0, '#meters') k;
  if v_tick.tick is null or fairq._has_news(v_tick) then
    perform fairq._promote(0, '#meters', 1, true);
  end if;
  foreach v_scope in array array['queue ' || p_queue, 'cluster'] loop
    v_lane := fairq._lane(0, '#meters', v_scope);
    if v_scope = 'cluster' and p_claim_lease is not null and (v_lane.policy).max_running is not null then
      raise exception 'queue "%" is popped with claim leases, but the cluster has a cap of %', p_queue, (v_lane.policy).max_running
        using errcode = 'QF015', hint = 'Prefetched tasks would hold places of the cluster without running. Pop without a claim lease, or lift the cap.';
    end if;
    if v_lane.policy is distinct from null then
      p_limit := least(p_limit, (fairq._allowance(v_lane.policy, v_lane.gate, p_now)).tasks);
    end if;
  end loop;
  return p_limit;
end;
$$;
comment on function fairq._meter(text, integer, timestamptz, interval) is 'How many tasks the meters of a queue and of the cluster let pass now.';
