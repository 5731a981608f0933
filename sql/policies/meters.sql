-- Caps, rates and breakers of a whole queue and of the cluster, asked at pop: how many tasks may be popped now. Takes the lock of #meters, so pops of such
-- queues go one after the other; other queues never come here.
-- Hears first what left since, so what it says is exact.
-- Returns at most p_limit.
-- Raises QF015: claim leases and a cluster cap exclude each other.
-- Locks: the domain #meters, waits for it; until the transaction ends.
create function fairq._meter(p_queue text, p_limit integer, p_now timestamptz, p_claim_lease interval) returns integer
language plpgsql set search_path = '' as $$
declare
  v_lane fairq.lanes;
  v_scope text;
begin
  perform fairq._settle_meters(p_now);
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

-- Hears what was rung for the meters, and writes them.
-- Locks: the domain #meters, waits for it; until the transaction ends.
create function fairq._settle_meters(p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
declare
  v_meter fairq.lanes;
begin
  perform fairq._lock_domain(0, '#meters', true);
  foreach v_meter in array fairq._hear_counters(0, '#meters', p_now) loop
    perform fairq._write_counter(0, '#meters', v_meter.group_key, v_meter);
  end loop;
end;
$$;

-- In which meters a task of this queue holds a place: 1 its queue, 2 the cluster.
create function fairq._meters_of(p_queue text) returns integer
language plpgsql stable set search_path = '' as $$
begin
  return ((case when fairq._counts((fairq._lane(0, '#meters', 'queue ' || p_queue)).policy) then 1 else 0 end)
    + (case when fairq._counts((fairq._lane(0, '#meters', 'cluster')).policy) then 2 else 0 end))::integer;
end;
$$;

-- Takes the places of tasks just popped. The caller holds #meters since it asked.
create function fairq._charge_meters(p_queue text, p_popped integer, p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
begin
  perform fairq._take_place(0, '#meters', 'queue ' || p_queue, p_now, p_popped);
  perform fairq._take_place(0, '#meters', 'cluster', p_now, p_popped);
end;
$$;
