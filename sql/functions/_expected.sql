create function fairq._expected(p_pace fairq.pace, p_kind text, p_cost double precision) returns double precision
language sql
immutable
parallel safe
as $$ select coalesce((select e.seconds from unnest(p_pace.estimates) e where e.kind = p_kind), p_cost) $$;
comment on function fairq._expected(fairq.pace, text, double precision) is
  'Seconds that a task is expected to take: the estimate of its group and kind; the cost it was created with while there is none.';
