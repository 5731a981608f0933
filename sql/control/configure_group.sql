-- Changes settings of one group of a queue: columns of fairq.groups, see _check_settings. Those it lacks are its queue's. Takes effect at once, or, while
-- another session promotes, with the next promotion. A first cap or breaker counts the tasks that are in flight already.
-- Returns the settings in force. Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED, QF007 a number out of range, QF009 a time, QF014 an
-- unknown setting, or a budget where groups share by count. Locks: settings; groups, one row; then the domain, if nobody promotes. Waits for no pop.
create function fairq.configure_group(p_queue text, p_group_key text, p_settings jsonb default '{}') returns fairq.groups
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_group fairq.groups;
  v_shard_no integer;
begin
  perform from fairq.settings s for update;
  v_shard_no := fairq._group_shard(p_queue, p_group_key);
  v_group := fairq._set_limits(v_shard_no, p_queue, p_group_key, format('group "%s"', p_group_key), p_settings);
  perform fairq._check_unit(fairq._queue(p_queue), v_group.budget);
  if exists (select from jsonb_object_keys(p_settings) c(name) where c.name like 'user@_%' escape '@') then
    -- Its users look their settings up again. For users that only have tasks in flight, see _ring_limited.
    insert into fairq.rings (shard_no, queue, group_key, user_key, configured)
    select l.shard_no, p_queue, l.group_key, l.line, true from fairq.lanes l
    where l.shard_no = v_shard_no and l.queue in (p_queue, fairq._users_of(p_queue)) and l.group_key = p_group_key
      and (l.queue <> p_queue or l.line <> '');
  end if;
  -- Hears the ring: ready tasks go back in line, under the new limits. While another session promotes, this does not wait: the next pass hears the ring.
  perform fairq._promote(v_shard_no, p_queue, 1, false);
  return v_group;
end;
$$;
comment on function fairq.configure_group is 'Changes settings of a group. An absent setting stays as it is; null removes one.';
