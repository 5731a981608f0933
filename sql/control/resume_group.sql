-- Serves a paused group, or a user of it, again. It starts at the clock: nothing makes up for what it missed.
-- Raises QF001 group key, QF003 unknown queue, QF006 user key. Locks: groups, one row.
create function fairq.resume_group(p_queue text, p_group_key text, p_user_key text default null) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_shard_no integer := fairq._group_shard(p_queue, p_group_key, p_user_key);
begin
  -- While this waits for the row, the group may move.
  loop
    update fairq.groups g
    set paused_at = null
    where g.shard_no = v_shard_no and g.queue = p_queue and g.group_key = p_group_key and g.user_key = coalesce(p_user_key, '');
    exit when v_shard_no = fairq._home(p_group_key);
    v_shard_no := fairq._home(p_group_key);
  end loop;
  perform fairq._ring_group(v_shard_no, p_queue, p_group_key, p_user_key);
end;
$$;
comment on function fairq.resume_group is 'Serves a paused group, or one of its users, again.';
