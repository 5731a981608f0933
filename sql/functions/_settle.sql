-- The gate after the news of tasks that left: places come free; failures in a row open the breaker, a success closes it. p_failures
-- counts those after the last success, p_succeeded says whether there was one.
-- Settings may have changed since. Places are kept even without any, while tasks that hold one are about to report it; nothing left to keep is null.
create function fairq._settle(
  p_policy fairq.policy,
  p_gate fairq.gate,
  p_freed integer,
  p_failures integer,
  p_succeeded boolean,
  p_now timestamptz
) returns fairq.gate
language plpgsql
immutable
set search_path = ''
as $$
begin
  p_gate.in_flight := coalesce(p_gate.in_flight, 0) - p_freed;
  if p_policy is not distinct from null and p_gate.in_flight = 0 then
    return null;
  end if;
  -- Tasks of before the rate was raised are paid for at the new rate: never more than one burst is owed.
  p_gate.rate_at := case
    when p_policy.rate_seconds is not null and p_gate.rate_at is not null
      then least(p_gate.rate_at, p_now + p_policy.rate_burst * p_policy.rate_seconds * interval '1 second')
  end;
  if p_policy.breaker_threshold is null then
    p_gate.failures := 0;
    p_gate.open_until := null;
    p_gate.probe_until := null;
    return p_gate;
  end if;

  if p_succeeded then
    p_gate.failures := 0;
    p_gate.open_until := null;
    p_gate.probe_until := null;
  end if;
  if p_failures > 0 then
    p_gate.failures := coalesce(p_gate.failures, 0) + p_failures;
    -- A failure while it is open is one of the tasks that were in flight when it opened: it prolongs nothing. One while it is half open is the probe.
    if p_gate.failures >= p_policy.breaker_threshold and (p_gate.open_until is null or p_gate.open_until <= p_now) then
      p_gate.open_until := p_now + p_policy.breaker_cooldown;
      p_gate.probe_until := null;
    end if;
  end if;
  return p_gate;
end;
$$;
comment on function fairq._settle(fairq.policy, fairq.gate, integer, integer, boolean, timestamptz) is
  'The gate of a lane after the news of tasks that left.';
