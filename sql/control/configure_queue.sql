-- Creates a queue, or changes its settings, which are columns of fairq.queues. An absent setting stays as it is; a null removes one, and the default holds.
-- group_* and weight are the defaults of its groups, user_* those of their users; max_running, rate_* and breaker_* limit the queue as a whole. Takes effect
-- with the next promotion and pop.
-- Returns the settings in force.
-- Raises QF005 not READ COMMITTED, QF006 bad name, QF007 bad number, QF009 bad interval, QF014 an unknown setting, or a budget where groups share by count.
-- Locks: settings; queues, one row; where limits change, the meter of the queue, for which it waits, and the domains of the queue, if nobody promotes.
create function fairq.configure_queue(p_queue text, p_settings jsonb default '{}') returns fairq.queues
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_queue fairq.queues;
  v_is_new boolean;
  v_changes jsonb;
  v_groups_change boolean;
  v_meter_changes boolean;
begin
  perform from fairq.settings s for update;
  if p_queue is null or p_queue = '' or octet_length(p_queue) > 200 or p_queue like '#%' then
    raise exception 'the name of a queue has 1 to 200 bytes and does not begin with #' using errcode = 'QF006', hint = 'For example: documents.';
  end if;
  insert into fairq.queues (queue, metered, spread)
  select p_queue, s.max_running is not null, greatest(s.shard_count, s.moving_from) > 1 from fairq.settings s
  on conflict do nothing;
  v_is_new := found;
  perform fairq._open_domain(s.shard_no, p_queue) from fairq._shards(null) s(shard_no);
  -- The lock of fairq.settings keeps other settings calls out. So this row stays unlocked while this waits for domains, and the queue can be paused meanwhile.
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  v_changes := fairq._check_settings(format('queue "%s"', p_queue), 'fairq.queues', to_jsonb(v_queue), p_settings);
  if v_changes ?| array['fairness', 'group_budget'] then
    perform fairq._check_unit(jsonb_populate_record(v_queue, v_changes), b.budget)
    from (
      select (jsonb_populate_record(v_queue, v_changes)).group_budget as budget
      union all
      select g.budget from fairq._shards(null) s(shard_no) join fairq.groups g on g.shard_no = s.shard_no and g.queue = p_queue
    ) b;
  end if;
  select coalesce(bool_or(c.name ~ '^(weight$|fairness$|group_|user_)'), false), coalesce(bool_or(c.name ~ '^(max_running$|rate_|breaker_)'), false)
  into v_groups_change, v_meter_changes
  from jsonb_object_keys(v_changes) c(name);

  -- The meter first hears all news under the old settings.
  if v_meter_changes then perform fairq._hold_meter('queue ' || p_queue); end if;
  if v_changes <> '{}' then
    execute 'update fairq.queues q set ' || fairq._assignments(v_changes) || ' where q.queue = $2'
    using jsonb_populate_record(v_queue, v_changes), p_queue;
  end if;

  if v_groups_change and not v_is_new then
    -- All groups and users look their settings up again: the promotion that hears this ring knows which there are.
    insert into fairq.rings (shard_no, queue, group_key, configured) select s.shard_no, p_queue, '', true from fairq._shards(null) s(shard_no);
    perform fairq._promote(s.shard_no, p_queue, 1, false) from fairq._shards(null) s(shard_no);
  end if;
  if v_meter_changes then perform fairq._apply_meter('queue ' || p_queue); end if;
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if v_queue.notify and v_changes <> '{}' then perform pg_notify('fairq', p_queue); end if;
  return v_queue;
end;
$$;
comment on function fairq.configure_queue is 'Creates a queue, or changes its settings. An absent setting stays as it is; null removes one.';
