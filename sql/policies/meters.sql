-- Caps, rates and breakers of a whole queue and of the cluster, asked at pop: how many tasks may be popped now. Takes the lock of #meters, so pops of such
-- queues go one after the other; other queues never come here.
-- Hears first what left since, so what it says is exact.
-- Returns at most p_limit, and in which meters a task of this queue holds a place: 1 its queue, 2 the cluster.
-- Raises QF015: claim leases and a cluster cap exclude each other.
-- Locks: the domain #meters, waits for it a moment; until the transaction ends.
create function fairq._meter(p_queue text, p_limit integer, p_now timestamptz, p_claim_lease interval, out o_most integer, out o_meters integer)
language plpgsql set search_path = '' as $$
declare
  v_meter record;
begin
  o_most := 0;
  o_meters := 0;
  if not fairq._lock_counters(0, '#meters', false) then
    return;
  end if;
  perform fairq._settle_meters(p_now);
  o_most := p_limit;
  for v_meter in
    select m.bit, l.policy, l.gate
    from (values (1, 'queue ' || p_queue), (2, 'cluster')) m(bit, scope)
    cross join lateral fairq._lane(0, '#meters', m.scope) l
    where l.policy is distinct from null
  loop
    if v_meter.bit = 2 and p_claim_lease is not null and (v_meter.policy).max_running is not null then
      raise exception 'queue "%" is popped with claim leases, but the cluster has a cap of %', p_queue, (v_meter.policy).max_running
        using errcode = 'QF015', hint = 'Prefetched tasks would hold places of the cluster without running. Pop without a claim lease, or remove the cap.';
    end if;
    o_most := least(o_most, (fairq._allowance(v_meter.policy, v_meter.gate, p_now)).tasks);
    o_meters := o_meters + case when fairq._counts(v_meter.policy) then v_meter.bit else 0 end;
  end loop;
end;
$$;

-- Whether a pop of a queue with meters may find something: a task that waits or is ready, and room for it by what the meters last knew, or news of theirs.
-- Locks and writes nothing: who polls in vain leaves no trace.
create function fairq._is_worth_asking(p_queue text, p_now timestamptz) returns boolean
language plpgsql set search_path = '' as $$
begin
  return exists (
      select
      from fairq._shards(null) s(shard_no)
      left join lateral fairq._tick(s.shard_no, p_queue) k on true
      where k.tick is null
        or k.horizon is not null
        or fairq._has_news(k)
        or exists (select from fairq.ready r where r.shard_no = s.shard_no and r.queue = p_queue and r.position >= 0 and r.block >= k.clock)
    )
    and (exists (select from fairq._tick(0, '#meters') k where fairq._has_news(k))
      or not exists (
        select
        from (values ('queue ' || p_queue), ('cluster')) m(scope)
        cross join lateral fairq._lane(0, '#meters', m.scope) l
        where l.policy is distinct from null
          and (fairq._allowance(l.policy, l.gate, p_now)).tasks < 1
      )
      or not exists (select from fairq._tick(0, '#meters')));
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

-- Takes the places of tasks just popped. The caller holds #meters since it asked.
create function fairq._charge_meters(p_queue text, p_popped integer, p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
begin
  perform fairq._take_place(0, '#meters', 'queue ' || p_queue, p_now, p_popped);
  perform fairq._take_place(0, '#meters', 'cluster', p_now, p_popped);
end;
$$;
