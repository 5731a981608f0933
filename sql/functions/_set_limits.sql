-- Writes the settings of one lane: of a group, of a concurrency key (queue #keys), of a queue or the cluster (queue #meters). Null leaves a setting as it is,
-- a name in p_reset removes it. The lane is rung and looks its policy up again.
-- Raises QF007, QF009 (see _check_policy). What p_reset may name the caller has checked.
-- Locks: groups, one row.
create function fairq._set_limits(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_weight double precision,
  p_max_running integer,
  p_rate_limit integer,
  p_rate_period interval,
  p_rate_burst integer,
  p_breaker_threshold integer,
  p_breaker_cooldown interval,
  p_reset text[]
) returns fairq.groups
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_group fairq.groups;
begin
  perform fairq._check_policy(p_group_key, p_weight, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold,
    p_breaker_cooldown);
  insert into fairq.groups (shard_no, queue, group_key) values (p_shard_no, p_queue, p_group_key) on conflict do nothing;
  select g.* into v_group
  from fairq.groups g
  where g.shard_no = p_shard_no
    and g.queue = p_queue
    and g.group_key = p_group_key
  for update;

  if 'weight' = any(p_reset) then
    v_group.weight := null;
  end if;
  if 'max_running' = any(p_reset) then
    v_group.max_running := null;
  end if;
  if 'rate' = any(p_reset) then
    v_group.rate_limit := null;
    v_group.rate_period := null;
    v_group.rate_burst := null;
  end if;
  if 'breaker' = any(p_reset) then
    v_group.breaker_threshold := null;
    v_group.breaker_cooldown := null;
  end if;
  if coalesce(p_rate_limit, v_group.rate_limit) is null and p_rate_period is not null
    or coalesce(p_breaker_threshold, v_group.breaker_threshold) is null and p_breaker_cooldown is not null
  then
    raise exception 'a rate period or a breaker cooldown alone says nothing: %', p_group_key
      using errcode = 'QF007', hint = 'Set the rate limit or the breaker threshold with it.';
  end if;
  v_group.weight := coalesce(p_weight, v_group.weight);
  v_group.max_running := coalesce(p_max_running, v_group.max_running);
  v_group.rate_limit := coalesce(p_rate_limit, v_group.rate_limit);
  v_group.rate_burst := coalesce(p_rate_burst, v_group.rate_burst);
  v_group.breaker_threshold := coalesce(p_breaker_threshold, v_group.breaker_threshold);
  if v_group.rate_limit is not null then
    v_group.rate_period := coalesce(p_rate_period, v_group.rate_period, interval '1 second');
  end if;
  if v_group.breaker_threshold is not null then
    v_group.breaker_cooldown := coalesce(p_breaker_cooldown, v_group.breaker_cooldown, interval '1 minute');
  end if;

  update fairq.groups g
  set weight = v_group.weight, max_running = v_group.max_running, rate_limit = v_group.rate_limit, rate_period = v_group.rate_period,
    rate_burst = v_group.rate_burst, breaker_threshold = v_group.breaker_threshold, breaker_cooldown = v_group.breaker_cooldown
  where g.shard_no = p_shard_no
    and g.queue = p_queue
    and g.group_key = p_group_key;
  perform fairq._ring_group(p_shard_no, p_queue, p_group_key);
  return v_group;
end;
$$;
comment on function fairq._set_limits(integer, text, text, double precision, integer, integer, interval, integer, integer, interval, text[]) is
  'Writes the settings of a group, key, queue or of the cluster.';
