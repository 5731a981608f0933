-- What is wrong with settings of a queue, group or key, before anything is written.
-- Raises QF007 a number out of range, QF009 a time.
create function fairq._check_policy(
  p_of text,
  p_weight double precision,
  p_max_running integer,
  p_rate_limit integer,
  p_rate_period interval,
  p_rate_burst integer,
  p_breaker_threshold integer,
  p_breaker_cooldown interval
) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_weight is not null and (p_weight not between 0.001 and 1000 or p_weight = 'NaN') then
    raise exception 'the weight % of % is out of range', p_weight, p_of
      using errcode = 'QF007', hint = 'Relative to an ordinary group of weight 1: 0.001 to 1000.';
  end if;
  if p_max_running < 0 or p_rate_limit < 1 or p_rate_burst not between 1 and 100000 or p_breaker_threshold < 1 then
    raise exception 'a limit of % is out of range: max running %, rate limit %, rate burst %, breaker threshold %', p_of,
      coalesce(p_max_running::text, 'not given'), coalesce(p_rate_limit::text, 'not given'), coalesce(p_rate_burst::text, 'not given'),
      coalesce(p_breaker_threshold::text, 'not given')
      using errcode = 'QF007', hint = 'A cap is 0 or more, a burst 1 to 100000, the others 1 or more. To lift a limit, name it in p_reset.';
  end if;
  -- A full burst at the slowest rate has to be paid for before the end of time, or promotion of the whole queue fails.
  if p_rate_period <= interval '0' or not fairq._is_span(p_rate_period, '366 days') or p_breaker_cooldown <= interval '0'
    or not fairq._is_span(p_breaker_cooldown, '366 days')
  then
    raise exception 'a time of % is out of range: rate period %, breaker cooldown %', p_of, coalesce(p_rate_period::text, 'not given'),
      coalesce(p_breaker_cooldown::text, 'not given')
      using errcode = 'QF009', hint = 'More than nothing, at most 366 days; for example: interval ''1 minute''.';
  end if;
end;
$$;
comment on function fairq._check_policy(text, double precision, integer, integer, interval, integer, integer, interval) is
  'Raises an error of class QF for settings that make no sense.';
