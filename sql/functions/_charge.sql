-- The gate after p_taken tasks went through it; less than nothing: so many came back, and are not charged. in_flight is the number of the group's tasks
-- that are counted, so it grows only where tasks are counted (see _counts): what a rate alone lets through nobody would report back.
create function fairq._charge(p_policy fairq.policy, p_gate fairq.gate, p_taken integer, p_now timestamptz) returns fairq.gate
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_taken = 0 then
    return p_gate;
  end if;
  if fairq._counts(p_policy) then
    p_gate.in_flight := coalesce(p_gate.in_flight, 0) + p_taken;
  end if;
  if p_policy.rate_seconds is not null then
    p_gate.rate_at := greatest(p_gate.rate_at, p_now) + p_taken * p_policy.rate_seconds * interval '1 second';
  end if;
  if p_gate.open_until is not null then
    p_gate.probe_until := case when p_taken > 0 then p_now + p_policy.breaker_cooldown end;
  end if;
  return p_gate;
end;
$$;
comment on function fairq._charge(fairq.policy, fairq.gate, integer, timestamptz) is 'The gate of a lane after tasks went through.';
