-- What applies to a group: its own settings, else those of its queue; null when nothing limits it, so that ordinary groups pay nothing.
create function fairq._policy(p_queue fairq.queues, p_group fairq.groups) returns fairq.policy
language plpgsql
immutable
set search_path = ''
as $$
declare
  v_policy fairq.policy;
  v_rate_limit integer := coalesce(p_group.rate_limit, p_queue.group_rate_limit);
begin
  v_policy.max_running := coalesce(p_group.max_running, p_queue.group_max_running);
  v_policy.paused_at := p_group.paused_at;
  if v_rate_limit is not null then
    v_policy.rate_seconds := (extract(epoch from coalesce(p_group.rate_period, p_queue.group_rate_period)) / v_rate_limit)::double precision;
    v_policy.rate_burst := coalesce(p_group.rate_burst, p_queue.group_rate_burst, least(2147483647, greatest(1, ceil(1 / v_policy.rate_seconds)))::integer);
  end if;
  v_policy.breaker_threshold := coalesce(p_group.breaker_threshold, p_queue.group_breaker_threshold);
  v_policy.breaker_cooldown := coalesce(p_group.breaker_cooldown, p_queue.group_breaker_cooldown);
  if v_policy.max_running is null and v_policy.paused_at is null and v_rate_limit is null and v_policy.breaker_threshold is null then
    return null;
  end if;
  return v_policy;
end;
$$;
comment on function fairq._policy(fairq.queues, fairq.groups) is 'What limits a group; null: nothing does.';
