-- What limits a group: its own settings, else those of its queue. Null when nothing does, so that ordinary groups pay nothing.
create function fairq._policy(p_queue fairq.queues, p_group fairq.groups) returns fairq.policy
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_policy fairq.policy;
  v_rate_limit integer := coalesce(p_group.rate_limit, p_queue.group_rate_limit);
begin
  v_policy.max_running := coalesce(p_group.max_running, p_queue.group_max_running);
  v_policy.paused_at := coalesce(p_group.paused_at, p_group.leaving_at);
  if v_rate_limit is not null then
    v_policy.rate_seconds := (extract(epoch from coalesce(p_group.rate_period, p_queue.group_rate_period)) / v_rate_limit)::double precision;
    v_policy.rate_burst := coalesce(p_group.rate_burst, p_queue.group_rate_burst, least(2147483647, greatest(1, ceil(1 / v_policy.rate_seconds)))::integer);
  end if;
  v_policy.breaker_threshold := coalesce(p_group.breaker_threshold, p_queue.group_breaker_threshold);
  v_policy.breaker_cooldown := coalesce(p_group.breaker_cooldown, p_queue.group_breaker_cooldown);
  v_policy.budget := coalesce(p_group.budget, p_queue.group_budget);
  v_policy.budget_seconds := extract(epoch from coalesce(p_group.budget_period, p_queue.group_budget_period))::double precision;
  if v_policy.max_running is null and v_policy.paused_at is null and v_rate_limit is null and v_policy.breaker_threshold is null
    and v_policy.budget is null
  then
    return null;
  end if;
  return v_policy;
end;
$$;

-- A queue as the users of a group see it: the settings for each user, the group's or else the queue's, stand in place of those for each group.
create function fairq._for_users(p_queue fairq.queues, p_group fairq.groups) returns fairq.queues
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  p_queue.weight := coalesce(p_group.user_weight, p_queue.user_weight);
  p_queue.group_max_running := coalesce(p_group.user_max_running, p_queue.user_max_running);
  p_queue.group_rate_limit := coalesce(p_group.user_rate_limit, p_queue.user_rate_limit);
  p_queue.group_rate_period := coalesce(p_group.user_rate_period, p_queue.user_rate_period);
  p_queue.group_rate_burst := coalesce(p_group.user_rate_burst, p_queue.user_rate_burst);
  p_queue.group_breaker_threshold := coalesce(p_group.user_breaker_threshold, p_queue.user_breaker_threshold);
  p_queue.group_breaker_cooldown := coalesce(p_group.user_breaker_cooldown, p_queue.user_breaker_cooldown);
  p_queue.group_budget := null;
  return p_queue;
end;
$$;

-- What limits a group, a user of a group (in the queue '#users NAME'), a concurrency key (a group of #keys), a whole queue ('queue NAME' of '#queue NAME')
-- or the cluster, by the present settings.
create function fairq._policy_of(p_shard_no integer, p_queue text, p_group_key text, p_user_key text default '') returns fairq.policy
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_of_users boolean := p_queue like '#users %';
  v_limits fairq.groups;
begin
  if v_of_users or p_queue = '#keys' or p_queue not like '#%' then
    return (
      select l.policy
      from fairq.queues q
      cross join lateral fairq._limits_now(p_shard_no, q, p_group_key, case when v_of_users then p_user_key end, v_of_users, true) l
      where q.queue = case when v_of_users then substr(p_queue, 8) else p_queue end
    );
  elsif p_group_key = 'cluster' then
    select s.max_running into v_limits.max_running from fairq.settings s;
  else
    select q.max_running, q.rate_limit, q.rate_period, q.rate_burst, q.breaker_threshold, q.breaker_cooldown
    into v_limits.max_running, v_limits.rate_limit, v_limits.rate_period, v_limits.rate_burst, v_limits.breaker_threshold, v_limits.breaker_cooldown
    from fairq.queues q
    where q.queue = substr(p_group_key, 7);
  end if;
  return fairq._policy(null, v_limits);
end;
$$;

-- Whether a queue limits each of its groups. Otherwise only groups with settings of their own may have limits.
create function fairq._limits_groups(p_queue fairq.queues) returns boolean
language sql immutable parallel safe
as $$ select coalesce(p_queue.group_max_running, p_queue.group_rate_limit, p_queue.group_breaker_threshold, p_queue.group_budget) is not null $$;

-- Whether tasks of a group take places, and report to its lane how they end.
create function fairq._counts(p_policy fairq.policy) returns boolean
language sql immutable parallel safe
as $$ select coalesce((p_policy).max_running, (p_policy).breaker_threshold) is not null $$;

-- Whether the number of tasks a group may have depends on the time: a rate, or a breaker that is not closed. Then no task is made ready for later.
create function fairq._runs_with_time(p_policy fairq.policy, p_gate fairq.gate) returns boolean
language sql immutable parallel safe
as $$ select (p_policy).rate_seconds is not null or (p_gate).open_until is not null $$;

-- The one place that says how many tasks of a group may be promoted now, when to look again if none, and why not more. Promotion uses the number and the
-- time, explain_task the reason. A new policy is one more step here, one in _charge and one in _settle.
-- p_reserved: what the group's ready and held tasks were charged, see fairq.pace. How many tasks a budget allows depends on what each is expected to use:
-- this function only says whether anything is left, see _share_out.
create function fairq._allowance(p_policy fairq.policy, p_gate fairq.gate, p_now timestamptz, p_reserved double precision default null) returns fairq.allowance
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_allowed integer := 2147483647;
  v_rate_room double precision;
begin
  if p_policy.paused_at is not null then
    return (0, null, format('paused since %s', p_policy.paused_at))::fairq.allowance;
  end if;

  if p_gate.held_until > p_now then
    return (0, p_gate.held_until, format('held until %s by %s', p_gate.held_until, coalesce('task ' || p_gate.held_by, 'an operator')))::fairq.allowance;
  end if;

  -- Breaker: closed, open, or half open with one probe. A probe that is never heard of again times out.
  if p_gate.open_until > p_now then
    return (0, p_gate.open_until, format('its breaker is open until %s after %s failures in a row', p_gate.open_until, p_gate.failures))::fairq.allowance;
  end if;
  if p_gate.probe_until > p_now then
    return (0, p_gate.probe_until, 'its breaker is half open and waits for one task to end')::fairq.allowance;
  end if;
  if p_gate.open_until is not null then v_allowed := 1; end if;

  if p_policy.max_running is not null then
    v_allowed := least(v_allowed, p_policy.max_running - coalesce(p_gate.in_flight, 0) - coalesce(p_gate.uncounted, 0));
    if v_allowed < 1 then
      -- A task that is not counted yet rings nothing when it leaves.
      return (0, case when p_gate.uncounted > 0 then p_now + interval '100 milliseconds' end,
        format('%s tasks are in flight, the cap is %s', coalesce(p_gate.in_flight, 0) + coalesce(p_gate.uncounted, 0), p_policy.max_running))::fairq.allowance;
    end if;
  end if;

  if p_policy.budget is not null and fairq._budget_left(p_policy, p_gate, p_reserved, p_now) <= 0 then
    return (0, fairq._renews_at(p_policy, p_now), format('its budget of %s is used up until %s: %s spent, %s expected of tasks in flight', p_policy.budget,
      fairq._renews_at(p_policy, p_now), case when p_gate.spent_until > p_now then round(p_gate.spent::numeric, 3) else 0 end,
      round(coalesce(p_reserved, 0)::numeric, 3)))::fairq.allowance;
  end if;

  -- Rate (GCRA): rate_at is when the tasks so far are paid for; up to burst tasks may run ahead of it.
  if p_policy.rate_seconds is not null then
    v_rate_room := p_policy.rate_burst - greatest(0, extract(epoch from p_gate.rate_at - p_now)::double precision) / p_policy.rate_seconds;
    -- A millionth of a task makes up for the rounding of timestamps.
    -- The outer greatest: after the clock was set back far, more tasks may be owed than an integer holds.
    v_allowed := least(v_allowed, greatest(0, floor(v_rate_room + 0.000001)))::integer;
    if v_allowed < 1 then
      return (0, p_gate.rate_at - (p_policy.rate_burst - 1) * p_policy.rate_seconds * interval '1 second',
        format('rate limited until %s', p_gate.rate_at - (p_policy.rate_burst - 1) * p_policy.rate_seconds * interval '1 second'))::fairq.allowance;
    end if;
  end if;
  return (v_allowed, null, null)::fairq.allowance;
end;
$$;

-- What is left of a budget. A task that ended in this period counts with what it used, a task in flight with what it is expected to use. So a task in flight
-- at the end of a period counts in the next one, and the budget is exceeded only by what tasks in flight use beyond their estimates. A millionth makes up
-- for rounding in steps.
create function fairq._budget_left(p_policy fairq.policy, p_gate fairq.gate, p_reserved double precision, p_now timestamptz) returns double precision
language sql immutable parallel safe as $$
  select p_policy.budget * 0.999999 - coalesce(p_reserved, 0) - case when p_gate.spent_until > p_now then p_gate.spent else 0 end
$$;

-- When a budget renews. Periods are counted from the beginning of 1970 in UTC, the same for all groups: nothing has to be stored.
create function fairq._renews_at(p_policy fairq.policy, p_now timestamptz) returns timestamptz
language sql immutable parallel safe
as $$ select to_timestamp((floor(extract(epoch from p_now)::double precision / p_policy.budget_seconds) + 1) * p_policy.budget_seconds) $$;

-- The gate after p_taken tasks went through it. in_flight grows only where tasks are counted (see _counts): where there is only a rate, nobody would report
-- their end.
create function fairq._charge(p_policy fairq.policy, p_gate fairq.gate, p_taken integer, p_now timestamptz) returns fairq.gate
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_taken = 0 then return p_gate; end if;
  if fairq._counts(p_policy) then p_gate.in_flight := coalesce(p_gate.in_flight, 0) + p_taken; end if;
  if p_policy.rate_seconds is not null then
    p_gate.rate_at := greatest(p_gate.rate_at, p_now) + p_taken * p_policy.rate_seconds * interval '1 second';
  end if;
  if p_gate.open_until is not null then p_gate.probe_until := p_now + p_policy.breaker_cooldown; end if;
  return p_gate;
end;
$$;

-- The gate after the news of tasks that left: places come free; failures in a row open the breaker, a success closes it. p_failures counts the failures
-- after the last success, p_succeeded says whether there was one.
-- Settings may have changed since. Even when no limit is left, taken places stay counted until their tasks report. Null when nothing is left to keep.
create function fairq._settle(
  p_policy fairq.policy, p_gate fairq.gate, p_freed integer, p_failures integer, p_succeeded boolean, p_now timestamptz,
  p_used double precision default null, p_hold bigint[] default null, p_begins_to_count boolean default false
) returns fairq.gate
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  p_gate.in_flight := coalesce(p_gate.in_flight, 0) - p_freed;
  -- A first cap, whose ring may lie behind the cut: tasks in flight may not be counted yet, see _adopt.
  if p_begins_to_count then p_gate.uncounted := 1; end if;
  -- Of several holds the one that ends last counts.
  if to_timestamp(p_hold[1] / 1000000.0) > coalesce(p_gate.held_until, p_now) then
    p_gate.held_until := to_timestamp(p_hold[1] / 1000000.0);
    p_gate.held_by := p_hold[2];
  elsif p_gate.held_until <= p_now then
    p_gate.held_until := null;
    p_gate.held_by := null;
  end if;
  if p_policy is not distinct from null and p_gate.in_flight = 0 and p_gate.held_until is null then
    return null;
  end if;
  -- Tasks from before the rate was raised are paid for at the new rate: never more than one burst is owed.
  p_gate.rate_at := case
    when p_policy.rate_seconds is not null and p_gate.rate_at is not null
      then least(p_gate.rate_at, p_now + p_policy.rate_burst * p_policy.rate_seconds * interval '1 second')
  end;
  if p_policy.budget is null then
    p_gate.spent := null;
    p_gate.spent_until := null;
  else
    p_gate.spent := case when p_gate.spent_until > p_now then p_gate.spent else 0 end + coalesce(p_used, 0);
    p_gate.spent_until := fairq._renews_at(p_policy, p_now);
  end if;
  if p_policy.breaker_threshold is null or p_succeeded then
    p_gate.failures := 0;
    p_gate.open_until := null;
    p_gate.probe_until := null;
  end if;
  if p_failures > 0 and p_policy.breaker_threshold is not null then
    p_gate.failures := coalesce(p_gate.failures, 0) + p_failures;
    -- A failure while the breaker is open comes from a task that was in flight when it opened: it prolongs nothing. While it is half open, it is the probe's.
    if p_gate.failures >= p_policy.breaker_threshold and (p_gate.open_until is null or p_gate.open_until <= p_now) then
      p_gate.open_until := p_now + p_policy.breaker_cooldown;
      p_gate.probe_until := null;
    end if;
  end if;
  return p_gate;
end;
$$;

-- The lane of a group or user (see _policy_of), or a counter, as it is: the newest version, one step in lanes_pkey, unless it is from before a rebuild.
-- All fields are null when there is none.
create function fairq._lane(p_shard_no integer, p_queue text, p_group_key text, p_user_key text default '') returns fairq.lanes
language plpgsql stable set search_path = pg_catalog, pg_temp set enable_sort = off as $$
declare
  v_lane fairq.lanes;
begin
  select l.* into v_lane from fairq.lanes l
  where l.shard_no = p_shard_no and l.queue = p_queue and l.group_key = p_group_key and l.user_key = p_user_key
    and (p_queue like '#%' and p_queue not like '#users %'
      or l.version >= (select k.first_version from fairq._tick(p_shard_no, case when p_queue like '#%' then substr(p_queue, 8) else p_queue end) k))
  order by l.version desc limit 1;
  return v_lane;
end;
$$;
