-- The one place that says how many tasks a group may have promoted now.
create function fairq._allowance(p_max_running integer, p_in_flight integer) returns integer
language sql
immutable
parallel safe
as $$
  select case
    when p_max_running is null then 2147483647
    else greatest(0, p_max_running - p_in_flight)
  end
$$;
comment on function fairq._allowance(integer, integer) is 'How many more tasks of a group may be promoted now.';
