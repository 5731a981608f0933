-- Creates a schedule, or changes its settings, which are columns of fairq.schedules. An absent setting stays as it is; a null removes one, and the default
-- holds. To repeat the same settings changes nothing, neither the next tick nor a pause. A schedule belongs to a group, like the tasks that it creates;
-- schedules of several groups may have one name. Its first tick is after its creation, or after a change of its rule. SQL cannot read cron expressions: see
-- unplanned_schedules for who plans their ticks.
-- Returns the schedule. Raises QF001 group key, QF002 payload or headers, QF003 unknown queue, QF006 bad name, kind or key, QF007 priority, QF009 bad time,
-- QF014 an unknown setting; QF017 neither cron nor every, or both, a bad cron, time_zone or missed, or a schedule of another owner. Locks: the schedule.
create function fairq.configure_schedule(p_name text, p_group_key text, p_settings jsonb default '{}') returns fairq.schedules
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_of text := format('schedule "%s" of group "%s"', left(p_name, 60), left(p_group_key, 60));
  v_old fairq.schedules;
  v_new fairq.schedules;
  v_shard_no integer := fairq._group_shard('default', p_group_key);
  v_is_new boolean;
begin
  perform fairq._check_name('the name of the schedule', p_name, 200, 'QF006', 'For example daily-report');
  perform fairq._check_names(v_of, p_settings, array['owner', 'cron', 'time_zone', 'every', 'spread', 'missed', 'queue', 'kind', 'priority', 'concurrency_key',
    'headers', 'payload']);

  -- While this waits for the row, the group may move.
  loop
    insert into fairq.schedules (shard_no, name, group_key, created_at, done_until) values (v_shard_no, p_name, p_group_key, v_now, v_now)
    on conflict do nothing;
    v_is_new := found;
    select s.* into v_old from fairq.schedules s
    where s.shard_no = v_shard_no and s.name = p_name and s.group_key = p_group_key
    for update;
    exit when v_shard_no = fairq._home(p_group_key);
    delete from fairq.schedules s where v_is_new and s.shard_no = v_shard_no and s.name = p_name and s.group_key = p_group_key;
    v_shard_no := fairq._home(p_group_key);
  end loop;

  begin
    v_new := jsonb_populate_record(v_old, p_settings);
  exception when data_exception then
    raise exception '% cannot have the settings %: %', v_of, left(p_settings::text, 100), sqlerrm
      using errcode = 'QF014', hint = 'Lengths of time are texts such as "5 minutes", or numbers of seconds.';
  end;
  v_new.time_zone := coalesce(v_new.time_zone, 'UTC');
  v_new.missed := coalesce(v_new.missed, 'last');
  v_new.queue := coalesce(v_new.queue, 'default');
  v_new.kind := coalesce(v_new.kind, 'default');
  v_new.payload := coalesce(v_new.payload, 'null');
  perform fairq._check_schedule(v_of, v_old, v_new);
  -- An app without a name (owner '') changes no schedule of another app, and owns none.
  v_new.owner := nullif(v_new.owner, '');
  -- A day is 24 hours, also when clocks change.
  v_new.every := make_interval(secs => extract(epoch from v_new.every)::double precision);
  v_new.spread := make_interval(secs => extract(epoch from v_new.spread)::double precision);
  v_new.delay := coalesce(fairq._share_of(v_new.spread, p_name, p_group_key), interval '0');
  if (v_new.cron, v_new.time_zone, v_new.every) is distinct from (v_old.cron, v_old.time_zone, v_old.every) then
    v_new.done_until := v_now;
    v_new.ticks := '{}';
    v_new.plan_at := case when v_new.cron is not null then v_now end;
    v_new.problem := null;
  end if;
  v_new := fairq._aimed(v_new);
  update fairq.schedules s
  set owner = v_new.owner, cron = v_new.cron, time_zone = v_new.time_zone, every = v_new.every, spread = v_new.spread, delay = v_new.delay,
    missed = v_new.missed, queue = v_new.queue, kind = v_new.kind, priority = v_new.priority, concurrency_key = v_new.concurrency_key,
    headers = v_new.headers, payload = v_new.payload, done_until = v_new.done_until, ticks = v_new.ticks, plan_at = v_new.plan_at,
    next_tick = v_new.next_tick, fire_at = v_new.fire_at, problem = v_new.problem
  where s.shard_no = v_shard_no and s.name = p_name and s.group_key = p_group_key
    and v_new is distinct from v_old;
  return v_new;
end;
$$;
comment on function fairq.configure_schedule is 'Creates a schedule, or changes its settings. An absent setting stays as it is; null removes one.';

-- Raises what is wrong with a schedule, see configure_schedule.
create function fairq._check_schedule(p_of text, p_old fairq.schedules, p_new fairq.schedules) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._queue(p_new.queue);
  perform fairq._check_task(p_new.group_key, p_new.payload, s.payload_limit, p_new.kind, coalesce(p_new.priority, 0), null, null, null, 1, null, null,
    p_new.concurrency_key, p_new.headers)
  from fairq.settings s;
  if jsonb_typeof(p_new.headers) <> 'object' then
    raise exception 'the headers of % are not an object', p_of using errcode = 'QF014', hint = 'A JSON object that travels with each task.';
  end if;
  if num_nonnulls(p_new.cron, p_new.every) <> 1 then
    raise exception '% has %', p_of, case when p_new.cron is null then 'neither cron nor every' else 'both cron and every' end
      using errcode = 'QF017', hint = 'Set one of them: {"cron": "0 3 * * *"} or {"every": "10 seconds"}; null removes the other.';
  end if;
  if p_new.cron !~ '^[0-9A-Za-z*,/#-]+( +[0-9A-Za-z*,/#-]+){4}$' or octet_length(p_new.cron) > 200 then
    raise exception 'the cron expression of % is "%"', p_of, left(p_new.cron, 60)
      using errcode = 'QF017', hint = 'Five fields: minute, hour, day of month, month, day of week. For less than a minute: every.';
  end if;
  if p_new.time_zone !~ '^[0-9A-Za-z_+/-]{1,64}$' then
    raise exception 'the time zone of % is "%"', p_of, left(p_new.time_zone, 60)
      using errcode = 'QF017', hint = 'A name of the tz database, such as Europe/Berlin.';
  end if;
  if p_new.missed not in ('last', 'skip', 'all') then
    raise exception 'missed of % is "%"', p_of, left(p_new.missed, 60)
      using errcode = 'QF017', hint = 'last (only the last one), skip (none that is late) or all (each of the last 100).';
  end if;
  perform fairq._check_length('every of ' || p_of, p_new.every, interval '366 days');
  if p_new.every < interval '1 second' or extract(month from p_new.every) <> 0 or extract(year from p_new.every) <> 0 then
    raise exception 'every of % is %', p_of, p_new.every
      using errcode = 'QF009', hint = 'At least a second, without months and years: for those set cron.';
  end if;
  if p_new.spread <> interval '0' then
    perform fairq._check_length('spread of ' || p_of, p_new.spread, interval '366 days');
  end if;
  if octet_length(p_new.owner) > 200 then
    raise exception 'the owner of % is "%"', p_of, left(p_new.owner, 60) using errcode = 'QF006', hint = 'The name of an app, up to 200 bytes.';
  end if;
  if p_old.owner <> p_new.owner then
    raise exception '% belongs to "%"', p_of, p_old.owner
      using errcode = 'QF017', hint = 'Give yours another name, or remove the other one first: select fairq.remove_schedule(...);';
  end if;
end;
$$;

-- A group's own part of a length of time: always the same for a group, and spread evenly over many groups.
create function fairq._share_of(p_length interval, p_name text, p_group_key text) returns interval
language sql immutable set search_path = pg_catalog, pg_temp as $$
  select make_interval(secs => round(
    extract(epoch from p_length) * ('x' || left(md5(p_name || ' ' || p_group_key), 15))::bit(60)::bigint / (1::bigint << 60)::numeric, 3)::double precision)
$$;
