create function fairq._backoff(p_base interval, p_cap interval, p_attempt integer) returns interval
language sql
volatile
as $$
  -- In seconds: 2^30 times a base of days would overflow an interval. It is past every cap that matters, and more would overflow in the end, too.
  select least(extract(epoch from p_cap), extract(epoch from p_base) * power(2, least(p_attempt - 1, 30)))::double precision
    * (0.75 + random() / 2) * interval '1 second'
$$;
comment on function fairq._backoff(interval, interval, integer) is
  'Pause before the next attempt: doubled each time, capped, 25 percent of jitter both ways.';
