-- Creates a queue, or changes its settings; null leaves one as it is, a name in p_reset removes it: ready_target; group_max_running, group_rate, group_breaker
-- (defaults of its groups); max_running, rate, breaker (limits of the queue as a whole). Takes effect with the next promotion and pop.
-- Returns the settings in force; the limits of the whole queue are in fairq.groups, queue '#meters'.
-- Raises QF005 not READ COMMITTED, QF006 bad name, QF007 bad number, QF009 bad interval, QF014 an unknown name in p_reset or p_fairness.
-- Locks: queues, one row; where limits change, the domains of the queue, or #meters, and tasks in flight.
create function fairq.configure_queue(
  p_queue text,
  p_ready_target integer default null,
  p_max_attempts integer default null,
  p_retry_base interval default null,
  p_retry_cap interval default null,
  p_retention interval default null,
  p_notify boolean default null,
  p_weight double precision default null,
  p_fairness text default null,
  p_group_max_running integer default null,
  p_group_rate_limit integer default null,
  p_group_rate_period interval default null,
  p_group_rate_burst integer default null,
  p_group_breaker_threshold integer default null,
  p_group_breaker_cooldown interval default null,
  p_max_running integer default null,
  p_rate_limit integer default null,
  p_rate_period interval default null,
  p_rate_burst integer default null,
  p_breaker_threshold integer default null,
  p_breaker_cooldown interval default null,
  p_reset text[] default '{}'
) returns fairq.queues
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_queue fairq.queues;
  v_shard_no integer;
  v_is_new boolean;
  v_groups_change boolean := num_nonnulls(p_weight, p_fairness, p_group_max_running, p_group_rate_limit, p_group_rate_period, p_group_rate_burst,
    p_group_breaker_threshold, p_group_breaker_cooldown) > 0 or p_reset && array['weight', 'group_max_running', 'group_rate', 'group_breaker'];
  v_meter_changes boolean := num_nonnulls(p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold, p_breaker_cooldown) > 0
    or p_reset && array['max_running', 'rate', 'breaker'];
begin
  -- No names: "not 'x' = any(null)" would be null, and take the setting away.
  p_reset := coalesce(p_reset, '{}');
  if p_queue is null or p_queue = '' or octet_length(p_queue) > 200 or p_queue like '#%' then
    raise exception 'the name of a queue has 1 to 200 bytes and does not begin with #' using errcode = 'QF006', hint = 'For example: documents.';
  end if;
  if p_ready_target not between 1 and 1000000 or p_max_attempts not between 1 and 1000000 then
    raise exception 'a setting of queue "%" is out of range: ready target %, max attempts %', p_queue, coalesce(p_ready_target::text, 'not given'),
      coalesce(p_max_attempts::text, 'not given')
      using errcode = 'QF007', hint = 'Both are 1 to 1000000.';
  end if;
  -- A time that cannot be taken from today, or added to it, would fail every later maintain() and finish.
  if not fairq._is_span(p_retry_base, '366 days') or not fairq._is_span(p_retry_cap, '366 days') or not fairq._is_span(p_retention, '36525 days') then
    raise exception 'a time of queue "%" is out of range: retry base %, retry cap %, retention %', p_queue, coalesce(p_retry_base::text, 'not given'),
      coalesce(p_retry_cap::text, 'not given'), coalesce(p_retention::text, 'not given')
      using errcode = 'QF009', hint = 'Zero or more; a back-off at most 366 days, the retention at most 36525.';
  end if;
  if p_fairness not in ('count', 'time') then
    raise exception 'groups of queue "%" cannot share by %', p_queue, p_fairness
      using errcode = 'QF014', hint = 'p_fairness is count (as many tasks for each) or time (as many worker seconds).';
  end if;
  perform fairq._check_policy(p_queue, p_weight, p_group_max_running, p_group_rate_limit, p_group_rate_period, p_group_rate_burst,
    p_group_breaker_threshold, p_group_breaker_cooldown);
  perform fairq._check_policy(p_queue, null, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold, p_breaker_cooldown);
  perform fairq._check_reset(format('queue "%s"', p_queue), p_reset, array['ready_target', 'weight', 'group_max_running', 'group_rate',
    'group_breaker', 'max_running', 'rate', 'breaker']);

  if p_group_rate_period is not null and p_group_rate_limit is null and ('group_rate' = any(p_reset) or not exists (
      select from fairq.queues q where q.queue = p_queue and q.group_rate_limit is not null))
    or p_group_breaker_cooldown is not null and p_group_breaker_threshold is null and ('group_breaker' = any(p_reset) or not exists (
      select from fairq.queues q where q.queue = p_queue and q.group_breaker_threshold is not null))
  then
    raise exception 'a rate period or a breaker cooldown alone says nothing: groups of queue "%"', p_queue
      using errcode = 'QF007', hint = 'Set the rate limit or the breaker threshold with it.';
  end if;

  insert into fairq.queues (queue) values (p_queue) on conflict do nothing;
  v_is_new := found;
  insert into fairq.domains (shard_no, queue)
  select s.shard_no, p_queue from fairq._shards(null) s(shard_no)
  on conflict do nothing;
  if v_groups_change and not v_is_new then
    -- Every lane first hears all there is to hear under the old settings; see configure_group.
    perform fairq._promote(s.shard_no, p_queue, 1, true) from fairq._shards(null) s(shard_no);
  end if;

  update fairq.queues q
  set ready_target = case when not 'ready_target' = any(p_reset) then coalesce(p_ready_target, q.ready_target) end,
    max_attempts = coalesce(p_max_attempts, q.max_attempts),
    retry_base = coalesce(p_retry_base, q.retry_base),
    retry_cap = coalesce(p_retry_cap, q.retry_cap),
    retention = coalesce(p_retention, q.retention),
    notify = coalesce(p_notify, q.notify),
    fairness = coalesce(p_fairness, q.fairness),
    weight = coalesce(p_weight, case when 'weight' = any(p_reset) then 1 else q.weight end),
    group_max_running = coalesce(p_group_max_running, case when not 'group_max_running' = any(p_reset) then q.group_max_running end),
    group_rate_limit = coalesce(p_group_rate_limit, case when not 'group_rate' = any(p_reset) then q.group_rate_limit end),
    group_rate_period = coalesce(p_group_rate_period, case when not 'group_rate' = any(p_reset) then q.group_rate_period end,
      case when p_group_rate_limit is not null then interval '1 second' end),
    group_rate_burst = coalesce(p_group_rate_burst, case when not 'group_rate' = any(p_reset) then q.group_rate_burst end),
    group_breaker_threshold = coalesce(p_group_breaker_threshold, case when not 'group_breaker' = any(p_reset) then q.group_breaker_threshold end),
    group_breaker_cooldown = coalesce(p_group_breaker_cooldown, case when not 'group_breaker' = any(p_reset) then q.group_breaker_cooldown end,
      case when p_group_breaker_threshold is not null then interval '1 minute' end)
  where q.queue = p_queue
  returning q.* into v_queue;

  if v_groups_change and not v_is_new then
    for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
      perform fairq._adopt(v_shard_no, v_queue, null);
      -- The groups that have a lane look their settings up again; others will when they get one.
      insert into fairq.rings (shard_no, queue, group_key)
      select distinct l.shard_no, l.queue, l.group_key
      from fairq.lanes l
      where l.shard_no = v_shard_no
        and l.queue = p_queue;
    end loop;
  end if;
  if v_meter_changes then
    perform fairq._configure_meter('queue ' || p_queue, p_queue, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold,
      p_breaker_cooldown, p_reset);
  elsif v_is_new then
    update fairq.queues q
    set metered = exists (
      select
      from fairq.groups g
      where g.shard_no = 0
        and g.queue = '#meters'
        and g.group_key = 'cluster'
        and coalesce(g.max_running, g.rate_limit, g.breaker_threshold) is not null
    )
    where q.queue = p_queue;
  end if;
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if v_queue.notify and (v_groups_change or v_meter_changes) then
    perform pg_notify('fairq', p_queue);
  end if;
  return v_queue;
end;
$$;
comment on function fairq.configure_queue(text, integer, integer, interval, interval, interval, boolean, double precision, text, integer, integer, interval, integer, integer, interval, integer, integer, interval, integer, integer, interval, text[]) is
  'Creates a queue, or changes its settings; null leaves one as it is.';
