-- How much of a group's budget is used: its own budget, or the one its queue gives to each group. By the present settings, and what promotion last heard.
-- Returns one row; none when there is no budget. spent is what tasks that ended in this period used, reserved what tasks in flight are expected to use, and
-- available what both leave until renews_at.
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
begin
  return query
    select p_queue, p_group_key, p.budget, justify_hours(make_interval(secs => p.budget_seconds)), u.spent, u.reserved,
      greatest(0, p.budget - u.spent - u.reserved), fairq._renews_at(p, v_now)
    from fairq._policy_of(v_shard_no, p_queue, p_group_key) p
    cross join lateral (
      select case when (l.gate).spent_until > v_now then (l.gate).spent else 0 end as spent, coalesce((l.pace).reserved, 0) as reserved
      from fairq._lane(v_shard_no, p_queue, p_group_key) l
    ) u
    where p.budget is not null;
end;
$$;
comment on function fairq.budget_usage is 'How much of a group''s budget is used, and when it renews.';
