-- Counters: concurrency keys (#keys), whole queues (#queue NAME) and the cluster (#cluster). Like groups they have a policy and a gate, kept in lanes, and
-- hear their rings by the same rule. Unlike groups they have no clock, no order and no addresses, and do not run through promotion.

-- Hears the rings of a domain's counters, and settles these counters.
-- Returns the counters that rang, as they are now; the caller writes them.
-- Locks: none; the caller holds the domain.
create function fairq._hear_counters(p_shard_no integer, p_queue text, p_now timestamptz) returns fairq.lanes[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_tick fairq.ticks;
  v_heard record;
  v_news fairq.news;
  v_lane fairq.lanes;
  v_lanes fairq.lanes[] := array[]::fairq.lanes[];
  v_due_at timestamptz;
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if v_tick.tick is null then v_tick := fairq._start_anew(p_shard_no, p_queue); end if;
  if not fairq._has_news(v_tick) then return v_lanes; end if;
  -- Counters whose hold has ended ring.
  v_due_at := v_tick.next_due_at;
  v_tick := fairq._wake_due(v_tick, p_now, 1000);
  select h.* into v_heard from fairq._hear(v_tick, 10000) h;
  foreach v_news in array coalesce(v_heard.o_news, '{}') loop
    v_lane := fairq._counter(p_shard_no, p_queue, v_news.group_key);
    if v_news.configured then
      v_lane.policy := fairq._policy_of(p_shard_no, p_queue, v_news.group_key);
    end if;
    v_lane.gate := fairq._settle(v_lane.policy, v_lane.gate, v_news.freed, v_news.failures, v_news.succeeded, p_now, null, v_news.hold);
    v_lanes := v_lanes || v_lane;
  end loop;
  v_tick := v_heard.o_tick;
  v_tick.next_due_at := least(
    (select min((k.gate).held_until) from unnest(v_lanes) k),
    (
      -- The next end of a hold. A pass wakes only a thousand, so ends already past count while some were due. Unused keys note in look_at since when they
      -- are unused: the hold tells them apart, and the lower bound passes them over.
      select l.look_at from fairq.lanes l
      where l.shard_no = p_shard_no and l.queue = p_queue and l.look_at >= least(v_due_at, p_now + interval '1 microsecond') and (l.gate).held_until is not null
        and l.group_key <> all(array(select k.group_key from unnest(v_lanes) k))
      order by l.look_at limit 1
    ));
  perform fairq._write_tick(v_tick);
  return v_lanes;
end;
$$;

-- A counter as it is, or a new one. Looks its policy up when none is stored.
create function fairq._counter(p_shard_no integer, p_queue text, p_group_key text) returns fairq.lanes
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_lane fairq.lanes := fairq._lane(p_shard_no, p_queue, p_group_key);
begin
  if v_lane.version is null then
    v_lane := (p_shard_no, 0, 0, 0, 0, 0, 0, 1, null, false, false, p_queue, p_group_key, '', '', '{}', null, null, null, null)::fairq.lanes;
  end if;
  if v_lane.policy is null then v_lane.policy := fairq._policy_of(p_shard_no, p_queue, p_group_key); end if;
  return v_lane;
end;
$$;

-- Writes the next version of a lane, or of a counter. A key without a taken place notes since when: the sweep removes it a minute later. If it were removed
-- at once, it would begin with version 1 again; under a held snapshot, each look-up would then go through all the versions it ever had.
-- Locks: lanes, one row replaced; the caller holds the domain.
create function fairq._write_lane(p_lane fairq.lanes) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if p_lane.queue like '#%' then
    p_lane.look_at := coalesce((p_lane.gate).held_until, case when p_lane.queue = '#keys' and (p_lane.gate).in_flight = 0 then fairq._now() end);
  end if;
  p_lane.version := p_lane.version + 1;
  insert into fairq.lanes select (p_lane).*;
  delete from fairq.lanes l
  where l.shard_no = p_lane.shard_no and l.queue = p_lane.queue and l.group_key = p_lane.group_key and l.user_key = '' and l.version = p_lane.version - 1;
end;
$$;
