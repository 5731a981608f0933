-- Slots kept for short tasks. A task is long when its lane expects it to cost more than short_under. Long tasks may have all slots of the queue's workers but
-- those kept. Promotion parks each long task it meets, which then holds nobody up, not even its own group. A pop that has room lets the next ones go on, those
-- of the group that is least far in virtual time first. The long tasks in flight are counted from their rows each time: no stored count can be wrong.

-- What a short task costs at most. Without kept slots no task is long: infinity; or 1e300 while some are still parked, for then promotion has to look each
-- task up.
create function fairq._short_under(p_tick fairq.ticks, p_queue fairq.queues) returns double precision
language sql immutable parallel safe as $$
  select case when p_queue.short_slots is not null then coalesce(p_queue.short_under, 1) when p_tick.long_since is not null then 1e300 else 'infinity' end
$$;

-- How many more long tasks may have a slot. One long task may always run, whatever is kept. Once only long tasks have waited for short_idle, they may have
-- all free slots.
-- Cost: the workers of the shard, and the long tasks in flight.
create function fairq._long_room(p_tick fairq.ticks, p_now timestamptz, p_lends boolean default true) returns integer
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_queue fairq.queues;
  v_slots integer;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_tick.queue;
  if v_queue.short_slots is null or (p_lends and p_tick.long_since <= p_now - v_queue.short_idle) then
    return 1000000;
  end if;
  select least(sum(w.slots), v_queue.max_running)::integer into v_slots from fairq.workers w
  where w.shard_no = p_tick.shard_no and w.lost_at is null and p_tick.queue = any(w.queues);
  return greatest(1, v_slots - v_queue.short_slots) - fairq._long_in_flight(p_tick.queue);
end;
$$;

-- Long tasks that have a slot: held, ready, or granted one a moment ago. Over all shards, as slots are.
create function fairq._long_in_flight(p_queue text) returns integer
language sql stable set search_path = pg_catalog, pg_temp as $$
  select count(*)::integer
  from fairq._shards(null) s(shard_no)
  cross join lateral (
    select
    from fairq.held h
    cross join lateral fairq._body(h.shard_no, h.id) t
    where h.shard_no = s.shard_no and h.meters >= 4 and t.queue = p_queue
    union all
    select from fairq.ready r where r.shard_no = s.shard_no and r.queue = p_queue and r.position >= 0 and r.long
    union all
    select from fairq.parked k where k.shard_no = s.shard_no and k.queue = p_queue and k.granted and k.concurrency_key = ''
  ) x
$$;

-- Whether a pop should promote because long tasks wait. No ring tells of the end of a long task. Inlined.
create function fairq._lets_long(p_tick fairq.ticks, p_now timestamptz) returns boolean
language sql stable as $$ select p_tick.long_since is not null and fairq._long_room(p_tick, p_now) > 0 $$;

-- Gives slots to long tasks, as many as this pop asks for and as there is room for; it rings for their lanes, which place them next. A group whose finish tag
-- has moved on since its task was parked waits until the others have come as far: what its short tasks cost, and what its attempts used beyond the estimate,
-- count here, too. A task whose group cannot go on stands in line again instead, see _open_keys.
-- Returns the tick, with the turn served last. Locks: parked, rings; the caller holds the domain and #keys.
-- Cost: parked_long_idx from that turn, a step per task and per group passed over, at most a thousand.
create function fairq._let_long(p_tick fairq.ticks, p_take integer, p_now timestamptz) returns fairq.ticks
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  -- Kept slots are lent only in a pass without news: news may tell of a short task.
  v_room integer := least(p_take, fairq._long_room(p_tick, p_now, not fairq._has_news(p_tick)));
  v_first fairq.parked;
  v_lane fairq.lanes;
begin
  for v_round in 1 .. 1000 loop
    exit when v_room < 1;
    select k.* into v_first from fairq.parked k
    where k.shard_no = p_tick.shard_no and k.queue = p_tick.queue and k.concurrency_key = '' and k.turn >= coalesce(p_tick.long_turn, 0)
    order by k.turn, k.id limit 1;
    exit when not found;
    p_tick.long_turn := v_first.turn;
    v_lane := fairq._lane(p_tick.shard_no, p_tick.queue, v_first.group_key);
    if v_lane.finish > v_first.turn then
      update fairq.parked k set turn = v_lane.finish where k.shard_no = p_tick.shard_no and k.id = v_first.id;
      continue;
    end if;
    if fairq._may_go_on(p_tick.shard_no, p_tick.queue, v_first.group_key, v_first.user_key, p_now) then
      v_room := v_room - 1;
      select v_first.turn + fairq._step(fairq._expected(v_lane.pace, t.kind, t.cost, v_lane.weight), coalesce(v_lane.weight, 1)) into v_first.turn
      from fairq.tasks t
      where t.shard_no = p_tick.shard_no and t.id = v_first.id;
      perform fairq._grant(v_first);
    else
      perform fairq._unpark(p_tick.shard_no, array[v_first.id]);
    end if;
    p_tick.long_top := greatest(p_tick.long_top, v_first.turn);
  end loop;
  return p_tick;
end;
$$;

-- Notes in the tick whether long tasks wait, since when only they do, and when they may have all slots, because somebody has to look then.
create function fairq._note_long(p_tick fairq.ticks, p_queue fairq.queues, p_now timestamptz) returns fairq.ticks
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  p_tick.long_since := case
    when exists (
      select from fairq.parked k
      where k.shard_no = p_tick.shard_no and k.queue = p_tick.queue and k.concurrency_key = ''
        and (k.granted or k.turn >= coalesce(p_tick.long_turn, 0))
    ) then coalesce(p_tick.long_since, p_now)
  end;
  if p_tick.long_since + p_queue.short_idle > p_now then
    p_tick.next_due_at := least(p_tick.next_due_at, p_tick.long_since + p_queue.short_idle);
  end if;
  return p_tick;
end;
$$;

-- The key of which a parked task has a place, or waits for one.
create function fairq._key_of(p_parked fairq.parked) returns text
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return coalesce(nullif(p_parked.concurrency_key, ''),
    (select t.concurrency_key from fairq.tasks t where t.shard_no = p_parked.shard_no and t.id = p_parked.id));
end;
$$;
