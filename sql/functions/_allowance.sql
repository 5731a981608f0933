-- The one place that says how many tasks a group may have promoted now, when to look again if none, and why not more. Promotion
-- uses the number and the time, explain_task the reason. A new policy is one more step here, one in _charge and one in _settle.
create function fairq._allowance(p_policy fairq.policy, p_gate fairq.gate, p_now timestamptz) returns fairq.allowance
language plpgsql
immutable
set search_path = ''
as $$
declare
  v_allowed integer := 2147483647;
  v_rate_room double precision;
begin
  if p_policy.paused_at is not null then
    return (0, null, format('paused since %s', p_policy.paused_at))::fairq.allowance;
  end if;

  -- Breaker: closed, open, half open with one probe; a probe that is never heard of again times out.
  if p_gate.open_until > p_now then
    return (0, p_gate.open_until, format('its breaker is open until %s after %s failures in a row', p_gate.open_until, p_gate.failures))::fairq.allowance;
  end if;
  if p_gate.probe_until > p_now then
    return (0, p_gate.probe_until, 'its breaker is half open and waits for one task to end')::fairq.allowance;
  end if;
  if p_gate.open_until is not null then
    v_allowed := 1;
  end if;

  if p_policy.max_running is not null then
    v_allowed := least(v_allowed, p_policy.max_running - coalesce(p_gate.in_flight, 0));
    if v_allowed < 1 then
      return (0, null, format('%s tasks are in flight, the cap is %s', coalesce(p_gate.in_flight, 0), p_policy.max_running))::fairq.allowance;
    end if;
  end if;

  -- Rate (GCRA): rate_at is when the tasks so far are paid for; up to burst tasks may run ahead of it.
  if p_policy.rate_seconds is not null then
    v_rate_room := p_policy.rate_burst - greatest(0, extract(epoch from p_gate.rate_at - p_now)::double precision) / p_policy.rate_seconds;
    -- A millionth of a task makes up for what timestamps round away.
    v_allowed := least(v_allowed, floor(v_rate_room + 0.000001))::integer;
    if v_allowed < 1 then
      return (0, p_gate.rate_at - (p_policy.rate_burst - 1) * p_policy.rate_seconds * interval '1 second',
        format('rate limited until %s', p_gate.rate_at - (p_policy.rate_burst - 1) * p_policy.rate_seconds * interval '1 second'))::fairq.allowance;
    end if;
  end if;
  return (v_allowed, null, null)::fairq.allowance;
end;
$$;
comment on function fairq._allowance(fairq.policy, fairq.gate, timestamptz) is
  'How many more tasks may be promoted now, when to look again, and why not more.';
