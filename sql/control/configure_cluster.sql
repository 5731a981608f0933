-- Changes settings of the installation, which are columns of fairq.settings: an absent one stays as it is, a null takes one away, so that the default holds.
-- max_running caps the tasks in flight over all queues and workers. It excludes claim leases (QF015 at pop).
-- The number of shards can change only while there are no tasks: it decides where a task is stored.
-- Returns the settings in force.
-- Raises QF013 when there are tasks, QF007 bad number, QF014 an unknown setting.
-- Locks: settings; #meters and held tasks when the cap changes.
create function fairq.configure_cluster(p_settings jsonb default '{}') returns fairq.settings
language plpgsql set search_path = '' as $$
declare
  v_old fairq.settings;
  v_new fairq.settings;
  v_changes jsonb;
begin
  select s.* into v_old from fairq.settings s for update;
  v_changes := fairq._check_settings('the cluster', 'fairq.settings', to_jsonb(v_old), p_settings);
  v_new := jsonb_populate_record(v_old, v_changes);
  if v_new.shard_count <> v_old.shard_count then
    lock table fairq.tasks in share row exclusive mode;
    if exists (select from fairq.tasks) or exists (select from fairq.finished_tasks) or exists (select from fairq.workers) then
      raise exception 'the number of shards cannot change from % to % while there are tasks or workers', v_old.shard_count, v_new.shard_count
        using errcode = 'QF013', hint = 'It decides where a task is stored. Install fairq in another database with the new number, and let this one run empty.';
    end if;
    delete from fairq.domains d where d.shard_no >= v_new.shard_count;
    delete from fairq.maintenance m where m.shard_no >= v_new.shard_count;
    perform fairq._open_domain(s.shard_no, q.queue) from generate_series(0, v_new.shard_count - 1) s(shard_no) cross join fairq.queues q;
    insert into fairq.maintenance (shard_no)
    select s.shard_no from generate_series(0, v_new.shard_count - 1) s(shard_no)
    on conflict do nothing;
  end if;

  if v_changes ? 'max_running' then
    perform fairq._settle_meters(fairq._now());
  end if;
  if v_changes <> '{}' then
    execute 'update fairq.settings s set ' || fairq._assignments(v_changes) using v_new;
  end if;
  if v_changes ? 'max_running' then
    perform fairq._apply_meter('cluster', null);
  end if;
  return v_new;
end;
$$;
comment on function fairq.configure_cluster is 'Changes settings of the installation; an absent one stays, a null takes one away.';
