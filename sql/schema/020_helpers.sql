-- Constants and arithmetic. They are tiny, immutable and without "set search_path", so they are inlined into the statements that use them.

-- Length of one round in units of virtual time: a task of cost 1 in a group of weight 1 moves its group by this much.
create function fairq._round() returns bigint
language sql immutable parallel safe as $$ select 1048576::bigint $$;

-- A distance in virtual time as a number of rounds.
create function fairq._rounds(p_distance bigint) returns double precision
language sql immutable parallel safe as $$ select p_distance::double precision / fairq._round() $$;

-- How far a task moves its group in virtual time. At least one unit, so two tasks of a group never share an address; at most 2^20 rounds, so that a
-- million tasks ahead fit in a bigint.
create function fairq._step(p_cost double precision, p_weight double precision) returns bigint
language sql immutable parallel safe
as $$ select least(1099511627776, greatest(1, ceil(fairq._round() * p_cost / p_weight)))::bigint $$;

-- How much of its credit a lane spends on tasks that are charged p_charged: at most half of that. So its tasks come sooner, but not in a flood, and two tasks
-- never share an address.
create function fairq._spent(p_credit bigint, p_charged bigint, p_tasks bigint) returns bigint
language sql immutable parallel safe as $$
  select case when p_credit > 0 then least(p_credit, greatest(0, p_charged - p_tasks) / 2) else 0 end
$$;

-- Position of a lane in its blocks. Between two lanes there is room for 2^20 newcomers.
create function fairq._lane_position(p_lane_no bigint) returns bigint
language sql immutable parallel safe as $$ select p_lane_no << 20 $$;

-- The name under which the lanes of a queue's users are stored as queue.
create function fairq._users_of(p_queue text) returns text
language sql immutable parallel safe as $$ select '#users ' || p_queue $$;

-- The shard of a group by its key: the first 60 bits of the key's md5, modulo the number of shards. Frozen: stored tasks depend on it.
create function fairq._shard_of(p_group_key text, p_shard_count integer) returns integer
language sql immutable parallel safe as $$
  select case
    when p_shard_count = 1 then 0
    else (('x' || left(md5(p_group_key), 15))::bit(60)::bigint % p_shard_count)::integer
  end
$$;

-- Whether an interval is neither negative nor longer than another one. It looks at the parts, too: a thousand years less as many in days may be short, but
-- goes out of range when it is added to a time.
create function fairq._is_span(p_time interval, p_longest interval) returns boolean
language sql immutable parallel safe as $$
  select p_time between interval '0' and p_longest and abs(extract(year from p_time)) <= 100 and abs(extract(day from p_time)) <= 36525
$$;

-- The one clock of the engine: the wall clock. Never now(): a lease must not stand still in a long transaction.
-- In tests it is the session setting fairq.now. That counts only if the installation is marked as one for tests: elsewhere no session can move a deadline, a
-- lease or a rate.
create function fairq._now() returns timestamptz
language sql parallel safe
as $$ select case when current_setting('fairq.now', true) <> '' then fairq._test_clock() else clock_timestamp() end $$;

-- The session's clock, if it counts; else the wall clock.
create function fairq._test_clock() returns timestamptz
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if (select s.test_clock from fairq.settings s) then
    return current_setting('fairq.now')::timestamptz;
  end if;
  return clock_timestamp();
end;
$$;
