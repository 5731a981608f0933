-- Changes settings of one user of a group, as configure_group does for the group. Users need none: an unknown user has the settings user_* of the group, else
-- of the queue. Weights and limits count inside the group, beside the group's own.
-- Returns the settings in force.
-- Raises QF001 group key, QF003 unknown queue, QF006 user key, QF005 not READ COMMITTED, QF007 a number out of range, QF009 a time, QF014 an unknown setting.
-- Locks: settings; groups, one row; then the domain, if nobody promotes. Waits for no pop.
create function fairq.configure_user(p_queue text, p_group_key text, p_user_key text, p_settings jsonb default '{}') returns fairq.groups
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_user fairq.groups;
  v_shard_no integer;
begin
  perform from fairq.settings s for update;
  -- Null is an error here, like an empty name.
  v_shard_no := fairq._group_shard(p_queue, p_group_key, coalesce(p_user_key, ''));
  v_user := fairq._set_limits(v_shard_no, p_queue, p_group_key, format('user "%s" of group "%s"', p_user_key, p_group_key), p_settings,
    '{weight, max_running, rate_limit, rate_period, rate_burst, breaker_threshold, breaker_cooldown}', p_user_key);
  perform fairq._promote(v_shard_no, p_queue, 1, false);
  return v_user;
end;
$$;
comment on function fairq.configure_user is 'Changes settings of a user of a group. An absent setting stays as it is; null removes one.';
