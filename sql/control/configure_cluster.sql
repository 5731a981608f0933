-- Changes settings of the installation: columns of fairq.settings, see _check_settings. max_running caps the tasks in flight over all queues and workers, and
-- excludes claim leases (QF015 at pop). When shard_count changes, groups have to move: move_groups does that, and until it is done, another change is refused.
-- A move is needed even when nothing is stored yet: a transaction that began before may create tasks by the old number.
-- Returns the settings in force. Raises QF013 while groups move, QF007 bad number, QF014 an unknown setting.
-- Locks: settings; when shard_count changes, all domains at once (it waits until all are free); when the cap changes, the cluster's meter and held tasks.
create function fairq.configure_cluster(p_settings jsonb default '{}') returns fairq.settings
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_old fairq.settings;
  v_new fairq.settings;
  v_changes jsonb;
begin
  select s.* into v_old from fairq.settings s for update;
  v_changes := fairq._check_settings('the cluster', 'fairq.settings', to_jsonb(v_old), p_settings);
  v_new := jsonb_populate_record(v_old, v_changes);
  if v_new.shard_count <> v_old.shard_count and v_old.moving_from is not null then
    raise exception 'there cannot be % shards while groups move from % to %', v_new.shard_count, v_old.moving_from, v_old.shard_count
      using errcode = 'QF013',
        hint = format('Let that move end: fairq cluster set --shard-count %s, or select fairq.move_groups(); until it says done.', v_old.shard_count);
  elsif v_new.shard_count <> v_old.shard_count then
    perform fairq._begin_move(v_old.shard_count, v_new.shard_count);
    select s.moving_from, s.moving_groups into v_new.moving_from, v_new.moving_groups from fairq.settings s;
    perform fairq._greet_workers(v_new);
    v_changes := v_changes - 'shard_count';
  end if;

  if v_changes ? 'max_running' then perform fairq._hold_meter('cluster'); end if;
  if v_changes <> '{}' then
    execute 'update fairq.settings s set ' || fairq._assignments(v_changes) using v_new;
  end if;
  if v_changes ? 'max_running' then perform fairq._apply_meter('cluster'); end if;
  return v_new;
end;
$$;
comment on function fairq.configure_cluster is 'Changes settings of the installation. An absent setting stays as it is; null removes one.';
