-- How much of a rate is used: of a group's rate, its own or the one its queue gives to each group; with p_group_key null, of the rate of the whole queue.
-- Returns one row; none when there is no rate. available tasks may start at once; when that is 0, the next one may at next_at. At full_at the whole burst is
-- available again; null: it is now. Raises QF001 group key, QF003 unknown queue. Cost: the settings of the group and its lane, one index step each.
create function fairq.rate_usage(p_queue text, p_group_key text default null)
returns table (
  queue text, group_key text, rate_limit integer, rate_period interval, rate_burst integer, used integer, available integer, next_at timestamptz,
  full_at timestamptz
)
language plpgsql security definer rows 1 set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues := fairq._queue(p_queue);
  v_shard_no integer := case when p_group_key is null then 0 else fairq._group_shard(p_queue, p_group_key) end;
  -- The rate of the whole queue is that of its meter.
  v_domain text := case when p_group_key is null then '#queue ' || p_queue else p_queue end;
  v_lane text := coalesce(p_group_key, 'queue ' || p_queue);
  v_policy fairq.policy;
  v_rate fairq.policy;
  v_gate fairq.gate;
begin
  -- By the present settings, of which the lane may not have heard yet.
  v_policy := fairq._policy_of(v_shard_no, v_domain, v_lane);
  if v_policy.rate_seconds is null then return; end if;
  -- Only the rate: other limits of the group do not count here.
  v_gate.rate_at := (fairq._settle(v_policy, (fairq._lane(v_shard_no, v_domain, v_lane)).gate, 0, 0, false, v_now)).rate_at;
  v_rate.rate_seconds := v_policy.rate_seconds;
  v_rate.rate_burst := v_policy.rate_burst;
  return query
    select p_queue, p_group_key, case when p_group_key is null then v_queue.rate_limit else coalesce(g.rate_limit, v_queue.group_rate_limit) end,
      case when p_group_key is null then v_queue.rate_period else coalesce(g.rate_period, v_queue.group_rate_period) end,
      v_policy.rate_burst, v_policy.rate_burst - a.tasks, a.tasks, a.look_at, case when v_gate.rate_at > v_now then v_gate.rate_at end
    from fairq._allowance(v_rate, v_gate, v_now) a
    left join fairq.groups g on g.shard_no = v_shard_no and g.queue = p_queue and g.group_key = p_group_key and g.user_key = '';
end;
$$;
comment on function fairq.rate_usage is 'How much of a rate is used, of a group or of a whole queue, and when the next task may start.';
