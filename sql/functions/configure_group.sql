-- Settings of one group of a queue; null leaves one as it is, a name in p_reset takes the queue's default again. Takes effect with the next promotion,
-- which the next pop makes. Groups need no settings: unknown ones have those of their queue.
-- A first cap or breaker counts the tasks that are in flight already.
-- Returns the settings in force.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED, QF007 a number out of range, QF009 a time, QF014 an unknown name in p_reset.
-- Locks: the domain, waits for it; groups, one row; tasks in flight of the group.
create function fairq.configure_group(
  p_queue text,
  p_group_key text,
  p_weight double precision default null,
  p_max_running integer default null,
  p_rate_limit integer default null,
  p_rate_period interval default null,
  p_rate_burst integer default null,
  p_breaker_threshold integer default null,
  p_breaker_cooldown interval default null,
  p_reset text[] default '{}'
) returns fairq.groups
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_group fairq.groups;
  v_shard_no integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  perform fairq._check_reset(format('group "%s"', p_group_key), p_reset, array['weight', 'max_running', 'rate', 'breaker']);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  -- The lane first hears all there is to hear under the old settings, so that what is counted below is counted once.
  perform fairq._promote(v_shard_no, p_queue, 1, true);
  v_group := fairq._set_limits(v_shard_no, p_queue, p_group_key, p_weight, p_max_running, p_rate_limit, p_rate_period, p_rate_burst,
    p_breaker_threshold, p_breaker_cooldown, p_reset);
  perform fairq._adopt(v_shard_no, q, p_group_key) from fairq.queues q where q.queue = p_queue;
  perform fairq._promote(v_shard_no, p_queue, 1, true);
  return v_group;
end;
$$;
comment on function fairq.configure_group(text, text, double precision, integer, integer, interval, integer, integer, interval, text[]) is
  'Changes settings of one group; null leaves one as it is.';
