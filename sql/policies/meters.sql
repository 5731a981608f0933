-- Meters: caps, rates and breakers of a whole queue, and the cap of the cluster. A pop asks them how many tasks it may take. Each is a counter with a domain of
-- its own: pops of one limited queue go one after the other, pops of other queues do not wait for them. Under a cap of the cluster all pops share its meter.

-- The meters of a queue's tasks, in the order in which they are locked. Most queues have none.
create function fairq._meters(p_queue text) returns table (scope text, place integer)
language sql stable rows 1 as $$
  select 'cluster', 2 from fairq.settings s where s.max_running is not null
  union all
  select 'queue ' || q.queue, 1 from fairq.queues q
  where q.queue = p_queue and coalesce(q.max_running, q.rate_limit, q.breaker_threshold) is not null
$$;

-- How many tasks the meters of a queue let pass. They first hear which tasks have left, so the answer is exact.
-- Returns that number, at most p_limit; the meters asked, to which popped tasks are charged; and in which of them a task takes a place: 1 queue, 2 cluster.
-- Raises QF015: claim leases and a cluster cap exclude each other.
-- Locks: the domains of the meters, until the transaction ends; waits a moment for each.
create function fairq._meter(
  p_queue text, p_limit integer, p_now timestamptz, p_claim_lease interval, out o_most integer, out o_scopes text[], out o_meters integer
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_meter record;
  v_lane fairq.lanes;
begin
  o_most := p_limit;
  o_scopes := '{}';
  o_meters := 0;
  for v_meter in select m.scope, m.place from fairq._meters(p_queue) m loop
    if not fairq._lock_counters(0, '#' || v_meter.scope, false) then
      o_most := 0;
      return;
    end if;
    perform fairq._settle_meter(v_meter.scope, p_now);
    v_lane := fairq._lane(0, '#' || v_meter.scope, v_meter.scope);
    if v_meter.place = 2 and p_claim_lease is not null and (v_lane.policy).max_running is not null then
      raise exception 'queue "%" is popped with claim leases, but the cluster has a cap of %', p_queue, (v_lane.policy).max_running
        using errcode = 'QF015', hint = 'Prefetched tasks would hold places of the cluster without running. Pop without a claim lease, or remove the cap.';
    end if;
    if v_lane.policy is distinct from null then
      o_most := least(o_most, (fairq._allowance(v_lane.policy, v_lane.gate, p_now)).tasks);
    end if;
    o_scopes := o_scopes || v_meter.scope;
    o_meters := o_meters + case when fairq._counts(v_lane.policy) then v_meter.place else 0 end;
  end loop;
end;
$$;

-- Whether a pop of a metered queue may find something: a task that waits or is ready, and room for it by what the meters last knew, or news for them.
-- Locks and writes nothing: a poll in vain leaves no trace.
create function fairq._is_worth_asking(p_queue text, p_now timestamptz) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  return exists (
      select
      from fairq._shards(null) s(shard_no)
      left join lateral fairq._tick(s.shard_no, p_queue) k on true
      where k.tick is null
        or k.horizon is not null
        or fairq._has_news(k)
        or fairq._lets_long(k, p_now)
        or exists (select from fairq.ready r where r.shard_no = s.shard_no and r.queue = p_queue and r.position >= 0 and r.block >= k.clock)
    )
    and not exists (
      select
      from fairq._meters(p_queue) m
      cross join lateral fairq._tick(0, '#' || m.scope) k
      cross join lateral fairq._lane(0, '#' || m.scope, m.scope) l
      where l.policy is distinct from null and (fairq._allowance(l.policy, l.gate, p_now)).tasks < 1
        and not fairq._has_news(k)
    );
end;
$$;

-- Whether the cluster's meter had no room when it last heard its rings.
create function fairq._is_cluster_full(p_now timestamptz) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
  select exists (
    select
    from fairq.settings s
    cross join lateral fairq._lane(0, '#cluster', 'cluster') l
    where s.max_running is not null and l.policy is distinct from null and (fairq._allowance(l.policy, l.gate, p_now)).tasks < 1
  )
$$;

-- Hears the rings of a meter, and writes it.
-- Locks: none of its own; the caller holds the domain of the meter.
create function fairq._settle_meter(p_scope text, p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._write_lane(m) from unnest(fairq._hear_counters(0, '#' || p_scope, p_now)) m;
end;
$$;

-- Locks a meter for a caller that changes its limits. It has then heard all news under the old limits.
-- Locks: the domain of the meter, until the transaction ends; waits for it.
create function fairq._hold_meter(p_scope text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._open_domain(0, '#' || p_scope);
  perform fairq._lock_domain(0, '#' || p_scope, true);
  perform fairq._settle_meter(p_scope, fairq._now());
end;
$$;
