-- Changes settings of the installation; null leaves one as it is.
-- p_max_running caps the tasks in flight over all queues and workers; it is kept in fairq.groups, queue '#meters'. It excludes claim leases (QF015 at pop).
-- The number of shards can change only while there are no tasks: it decides where a task is stored.
-- Raises QF013 when there are tasks, QF007 bad number, QF014 an unknown name in p_reset.
-- Locks: settings; #meters and held tasks when the cap changes.
create function fairq.configure_cluster(
  p_shard_count integer default null,
  p_payload_limit integer default null,
  p_max_running integer default null,
  p_reset text[] default '{}'
) returns fairq.settings
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_settings fairq.settings;
begin
  if p_shard_count not between 1 and 4096 or p_payload_limit not between 1 and 268435456 then
    raise exception 'shard count % or payload limit % is out of range', coalesce(p_shard_count::text, 'not given'), coalesce(p_payload_limit::text, 'not given')
      using errcode = 'QF007', hint = 'Shards: 1 to 4096. Payload limit: 1 byte to 256 MiB.';
  end if;
  perform fairq._check_policy('the cluster', null, p_max_running, null, null, null, null, null);
  perform fairq._check_reset('the cluster', p_reset, array['max_running']);
  select s.* into v_settings from fairq.settings s for update;
  if p_shard_count <> v_settings.shard_count then
    lock table fairq.tasks in share row exclusive mode;
    if exists (select from fairq.tasks) or exists (select from fairq.finished_tasks) or exists (select from fairq.workers) then
      raise exception 'the number of shards cannot change from % to % while there are tasks or workers', v_settings.shard_count, p_shard_count
        using errcode = 'QF013', hint = 'It decides where a task is stored. Install a second schema or database with the new number and let this one run empty.';
    end if;
    delete from fairq.domains d where d.shard_no >= p_shard_count;
    delete from fairq.maintenance m where m.shard_no >= p_shard_count;
    insert into fairq.domains (shard_no, queue)
    select s.shard_no, q.queue from generate_series(0, p_shard_count - 1) s(shard_no) cross join fairq.queues q
    on conflict do nothing;
    insert into fairq.maintenance (shard_no)
    select s.shard_no from generate_series(0, p_shard_count - 1) s(shard_no)
    on conflict do nothing;
  end if;

  update fairq.settings s
  set shard_count = coalesce(p_shard_count, s.shard_count), payload_limit = coalesce(p_payload_limit, s.payload_limit)
  returning s.* into v_settings;
  if p_max_running is not null or p_reset && array['max_running'] then
    perform fairq._configure_meter('cluster', null, p_max_running, null, null, null, null, null, p_reset);
  end if;
  return v_settings;
end;
$$;
comment on function fairq.configure_cluster(integer, integer, integer, text[]) is 'Changes settings of the installation; null leaves one as it is.';
