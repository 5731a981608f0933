-- Counters: concurrency keys (#keys), queues as a whole and the cluster (#meters). They have a policy and a gate as groups do, kept in lanes, and hear their
-- rings by the same rule; they have no clock, no order and no addresses, and do not run through promotion.

-- Hears what was rung for the counters of a domain, and settles them.
-- Returns the counters that rang, as they are now; the caller writes them.
-- Locks: none; the caller holds the domain.
create function fairq._hear_counters(p_shard_no integer, p_queue text, p_now timestamptz) returns fairq.lanes[]
language plpgsql set search_path = '' as $$
declare
  v_tick fairq.ticks;
  v_heard record;
  v_news fairq.news;
  v_lane fairq.lanes;
  v_lanes fairq.lanes[] := array[]::fairq.lanes[];
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if v_tick.tick is null then
    v_tick := fairq._count_anew(p_shard_no, p_queue);
  end if;
  if not fairq._has_news(v_tick) then
    return v_lanes;
  end if;
  select h.* into v_heard from fairq._hear(v_tick, 10000) h;
  foreach v_news in array coalesce(v_heard.o_news, '{}') loop
    v_lane := fairq._lane(p_shard_no, p_queue, v_news.group_key);
    if v_news.configured or v_lane.policy is null then
      v_lane.policy := fairq._policy_of(p_shard_no, p_queue, v_news.group_key);
    end if;
    v_lane.gate := fairq._settle(v_lane.policy, v_lane.gate, v_news.freed, v_news.failures, v_news.succeeded, p_now);
    v_lane.group_key := v_news.group_key;
    v_lane.finish := coalesce(v_lane.finish, 0);
    v_lanes := v_lanes || v_lane;
  end loop;
  perform fairq._write_tick(v_heard.o_tick);
  return v_lanes;
end;
$$;

-- Writes the next version of a counter. A key of which no place is taken needs none.
-- Locks: lanes, one row replaced; the caller holds the domain.
create function fairq._write_counter(p_shard_no integer, p_queue text, p_group_key text, p_lane fairq.lanes) returns void
language plpgsql set search_path = '' as $$
begin
  if p_queue <> '#keys' or (p_lane.gate).in_flight <> 0 then
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, policy, gate, cursors, admissible)
    values (p_shard_no, p_queue, p_group_key, coalesce(p_lane.version, 0) + 1, 0, coalesce(p_lane.finish, 0), 0, 1, p_lane.policy, p_lane.gate, '{}',
      false);
  end if;
  delete from fairq.lanes l
  where l.shard_no = p_shard_no and l.queue = p_queue and l.group_key = p_group_key and l.version = p_lane.version;
end;
$$;

-- Counts the places of keys or meters anew from the tasks that hold them: in a new installation, after a restored dump, for a repair. One statement counts,
-- removes the rings that these cover, and gives the snapshot: taken a moment apart, a task that left in between would be off the count already, and
-- its ring, which the tick holds for pending, would take it off again.
-- Returns the tick it wrote.
-- Locks: rings and lanes of the domain, which the caller holds. Cost: all tasks in flight; of all shards for the meters.
create function fairq._count_anew(p_shard_no integer, p_queue text) returns fairq.ticks
language plpgsql set search_path = '' as $$
declare
  v_snapshot pg_snapshot;
begin
  delete from fairq.lanes l where l.shard_no = p_shard_no and l.queue = p_queue;
  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue
  ),
  holder as (
    select t.queue, t.concurrency_key, h.shard_no, h.meters, h.keyed
    from fairq._shards(case when p_queue = '#keys' then p_shard_no end) x(shard_no)
    join fairq.held h on h.shard_no = x.shard_no
    join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
    union all
    select t.queue, t.concurrency_key, r.shard_no, 0, r.keyed
    from fairq.ready r
    join fairq.tasks t on t.shard_no = r.shard_no and t.id = r.id
    where r.shard_no = p_shard_no and r.keyed
    union all
    select k.queue, k.concurrency_key, k.shard_no, 0, true
    from fairq.parked k
    where k.shard_no = p_shard_no and k.granted
  ),
  taken as (
    select s.group_key, count(*) as places
    from holder h
    cross join lateral fairq._scopes(h.shard_no, h.queue, null, false, h.meters, case when h.keyed then h.concurrency_key end) s
    where s.shard_no = p_shard_no and s.queue = p_queue
    group by s.group_key
  ),
  counter as (
    select t.group_key from taken t
    union
    select g.group_key from fairq.groups g where g.shard_no = p_shard_no and g.queue = p_queue
    union
    select m.scope
    from (select 'cluster' union all select 'queue ' || q.queue from fairq.queues q where not q.internal) m(scope)
    where p_queue = '#meters'
      and fairq._meter_policy(m.scope) is distinct from null
    union
    -- What waits for a key is looked at again.
    select k.concurrency_key from fairq.parked k where p_queue = '#keys' and k.shard_no = p_shard_no and k.turn is not null
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, freed, configured)
    select p_shard_no, p_queue, c.group_key, -coalesce(t.places, 0), true
    from counter c
    left join taken t on t.group_key = c.group_key
  )
  select pg_current_snapshot() into v_snapshot;

  return fairq._write_tick(fairq._blank_tick(p_shard_no, p_queue,
    (select coalesce(max(k.tick), 0) from fairq.ticks k where k.shard_no = p_shard_no and k.queue = p_queue), v_snapshot));
end;
$$;
