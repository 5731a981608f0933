-- How much of a group's budget is used, its own or the one its queue gives to each, as its settings are now and promotion last heard.
-- Returns one row; none where there is no budget. spent is what tasks used that ended in this period, reserved what is expected of those in flight, and
-- available what is left beside both until renews_at.
-- Raises QF001 group key, QF003 unknown queue.
-- Cost: the settings of the group and its lane, one index step each.
create function fairq.budget_usage(p_queue text, p_group_key text)
returns table (
  queue text, group_key text, budget double precision, budget_period interval, spent double precision, reserved double precision,
  available double precision, renews_at timestamptz
)
language plpgsql security definer rows 1 set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer := fairq._group_shard(p_queue, p_group_key);
  v_policy fairq.policy;
  v_lane fairq.lanes;
begin
  v_policy := fairq._policy_of(v_shard_no, p_queue, p_group_key);
  if v_policy.budget is null then
    return;
  end if;
  v_lane := fairq._lane(v_shard_no, p_queue, p_group_key);
  queue := p_queue;
  group_key := p_group_key;
  budget := v_policy.budget;
  budget_period := justify_hours(make_interval(secs => v_policy.budget_seconds));
  spent := case when (v_lane.gate).spent_until > v_now then (v_lane.gate).spent else 0 end;
  reserved := coalesce((v_lane.pace).reserved, 0);
  available := greatest(0, budget - spent - reserved);
  renews_at := fairq._renews_at(v_policy, v_now);
  return next;
end;
$$;
comment on function fairq.budget_usage is 'How much of a group''s budget is used, and when it renews.';
