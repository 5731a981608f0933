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
  v_scope record;
  v_policy fairq.policy;
  v_rate fairq.policy;
  v_gate fairq.gate;
begin
  select s.shard_no, s.queue, s.group_key into v_scope from fairq._rate_scope(p_queue, p_group_key) s;
  -- By the present settings, of which the lane may not have heard yet.
  v_policy := fairq._policy_of(v_scope.shard_no, v_scope.queue, v_scope.group_key);
  if v_policy.rate_seconds is null then return; end if;
  -- Only the rate: other limits of the group do not count here.
  v_gate.rate_at := (fairq._settle(v_policy, (fairq._lane(v_scope.shard_no, v_scope.queue, v_scope.group_key)).gate, 0, 0, false, v_now)).rate_at;
  v_rate.rate_seconds := v_policy.rate_seconds;
  v_rate.rate_burst := v_policy.rate_burst;
  return query
    select p_queue, p_group_key, case when p_group_key is null then q.rate_limit else coalesce(g.rate_limit, q.group_rate_limit) end,
      case when p_group_key is null then q.rate_period else coalesce(g.rate_period, q.group_rate_period) end,
      v_policy.rate_burst, v_policy.rate_burst - a.tasks, a.tasks, a.look_at, case when v_gate.rate_at > v_now then v_gate.rate_at end
    from fairq.queues q
    left join fairq.groups g on g.shard_no = v_scope.shard_no and g.queue = q.queue and g.group_key = p_group_key and g.user_key = ''
    cross join fairq._allowance(v_rate, v_gate, v_now) a
    where q.queue = p_queue;
end;
$$;
comment on function fairq.rate_usage is 'How much of a rate is used, of a group or of a whole queue, and when the next task may start.';

-- The lane that a rate is charged to: of a group, or, with p_group_key null, of the queue as a whole.
-- Raises QF001 group key, QF003 unknown queue.
create function fairq._rate_scope(p_queue text, p_group_key text, out shard_no integer, out queue text, out group_key text)
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  if p_group_key is not null then
    shard_no := fairq._group_shard(p_queue, p_group_key);
    queue := p_queue;
    group_key := p_group_key;
    return;
  end if;
  perform fairq._queue(p_queue);
  shard_no := 0;
  queue := '#queue ' || p_queue;
  group_key := 'queue ' || p_queue;
end;
$$;
