-- Changes settings of the installation, which are columns of fairq.settings: an absent one stays as it is, a null takes one away, so that the default holds.
-- max_running caps the tasks in flight over all queues and workers. It excludes claim leases (QF015 at pop).
-- In an empty installation another number of shards is there at once. Elsewhere groups have to move: move_groups does that, and until it has, a third number is
-- refused.
-- Returns the settings in force.
-- Raises QF013 while groups move, QF007 bad number, QF014 an unknown setting.
-- Locks: settings (the whole table where the number of shards of an empty installation changes: waits for transactions that created tasks); where groups have to
-- move, all domains, or none until they are to be had; the meter of the cluster and held tasks when the cap changes.
create function fairq.configure_cluster(p_settings jsonb default '{}') returns fairq.settings
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_old fairq.settings;
  v_new fairq.settings;
  v_changes jsonb;
begin
  if p_settings ? 'shard_count' and not fairq._is_used() then
    -- Who creates tasks has read this table, and so holds a lock of it until his transaction ends: no task is on its way into a shard that goes.
    lock table fairq.settings in access exclusive mode;
  end if;
  select s.* into v_old from fairq.settings s for update;
  v_changes := fairq._check_settings('the cluster', 'fairq.settings', to_jsonb(v_old), p_settings);
  v_new := jsonb_populate_record(v_old, v_changes);
  if v_new.shard_count <> v_old.shard_count and v_old.moving_from is not null then
    raise exception 'there cannot be % shards while groups move from % to %', v_new.shard_count, v_old.moving_from, v_old.shard_count
      using errcode = 'QF013', hint = format('Let that move end: fairq cluster set --shard-count %s, or select fairq.move_groups(); until it says done.', v_old.shard_count);
  elsif v_new.shard_count <> v_old.shard_count and fairq._is_used() then
    perform fairq._begin_move(v_old.shard_count, v_new.shard_count);
    select s.moving_from, s.moving_groups into v_new.moving_from, v_new.moving_groups from fairq.settings s;
    perform fairq._greet_workers(v_new);
    v_changes := v_changes - 'shard_count';
  elsif v_new.shard_count <> v_old.shard_count then
    -- Settings go where their groups live now; those of keys hold in every shard.
    update fairq.groups g set shard_no = fairq._shard_of(g.group_key, v_new.shard_count) where g.queue <> '#keys';
    update fairq.schedules c set shard_no = fairq._shard_of(c.group_key, v_new.shard_count);
    delete from fairq.groups g where g.queue = '#keys' and g.shard_no > 0;
    insert into fairq.groups
    select (jsonb_populate_record(g, jsonb_build_object('shard_no', s.shard_no))).*
    from fairq.groups g
    cross join generate_series(1, v_new.shard_count - 1) s(shard_no)
    where g.queue = '#keys';
    delete from fairq.domains d where d.shard_no >= v_new.shard_count;
    delete from fairq.maintenance m where m.shard_no >= v_new.shard_count;
    delete from fairq.ticks k where k.shard_no >= v_new.shard_count;
    delete from fairq.lanes l where l.shard_no >= v_new.shard_count;
    delete from fairq.rings r where r.shard_no >= v_new.shard_count;
    delete from fairq.sweeps w where w.shard_no >= v_new.shard_count;
    perform fairq._open_domain(s.shard_no, q.queue) from generate_series(0, v_new.shard_count - 1) s(shard_no) cross join fairq.queues q;
    insert into fairq.maintenance (shard_no)
    select s.shard_no from generate_series(0, v_new.shard_count - 1) s(shard_no) on conflict do nothing;
    update fairq.queues q set spread = v_new.shard_count > 1;
  end if;

  if v_changes ? 'max_running' then
    perform fairq._hold_meter('cluster');
  end if;
  if v_changes <> '{}' then
    execute 'update fairq.settings s set ' || fairq._assignments(v_changes) using v_new;
  end if;
  if v_changes ? 'max_running' then
    perform fairq._apply_meter('cluster');
  end if;
  return v_new;
end;
$$;
comment on function fairq.configure_cluster is 'Changes settings of the installation; an absent one stays, a null takes one away.';

-- Whether anything is stored by shard that has to move when their number changes.
create function fairq._is_used() returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return exists (select from fairq.tasks) or exists (select from fairq.finished_tasks) or exists (select from fairq.workers);
end;
$$;
