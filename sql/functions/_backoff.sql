create function fairq._backoff(p_base interval, p_cap interval, p_attempt integer) returns interval
language sql
volatile
as $$
  -- 2^30 times any base is past every cap; more would overflow the interval.
  select least(p_cap, p_base * power(2, least(p_attempt - 1, 30))) * (0.75 + random() / 2)
$$;
comment on function fairq._backoff(interval, interval, integer) is
  'Pause before the next attempt: doubled each time, capped, 25 percent of jitter both ways.';
