create function fairq._counts(p_policy fairq.policy) returns boolean
language sql
immutable
parallel safe
as $$ select coalesce((p_policy).max_running, (p_policy).breaker_threshold) is not null $$;
comment on function fairq._counts(fairq.policy) is 'Whether the tasks of a group hold places, and tell their lane how they end.';
