-- Checks the settings that a configure_* function is given. Settings are columns of p_table; p_row is the row as it is; p_known are those that may be named
-- (null: all). A null removes a setting: the column gets its default. This is the one place that knows the ranges, for all scopes: nothing else writes these
-- columns.
-- Returns the columns to write. A rate and its period, a breaker and its cooldown come and go together.
-- Raises QF014 an unknown setting, or a value of the wrong type; QF007 a number, QF009 a time out of range.
create function fairq._check_settings(p_of text, p_table regclass, p_row jsonb, p_settings jsonb, p_known text[] default null) returns jsonb
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_changes jsonb := '{}'::jsonb;
  v_setting record;
  v_value jsonb;
  v_number double precision;
  v_fits boolean;
begin
  p_known := array(
    select a.attname::text from pg_catalog.pg_attribute a
    where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped
      and a.attname <> all(array['singleton', 'shard_no', 'queue', 'kind', 'group_key', 'user_key', 'metered', 'internal', 'spread', 'test_clock',
        'paused_at', 'draining_at', 'leaving_at', 'moving_from', 'moving_groups', 'moving_after'])
      and (p_known is null or a.attname = any(p_known))
    order by a.attnum
  );
  perform fairq._check_names(p_of, p_settings, p_known);

  for v_setting in
    select e.key as name, e.value, e.value #>> '{}' as input, format_type(a.atttypid, null) as type, pg_get_expr(d.adbin, d.adrelid) as preset,
      b.least, b.most
    from jsonb_each(p_settings) e
    join pg_catalog.pg_attribute a on a.attrelid = p_table and a.attname = e.key
    left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    left join (
      -- Times are in seconds.
      values
        ('weight', 0.001, 1000), ('max_running', 0, 2147483647),
        -- The time that a full burst takes at the slowest rate must fit into a timestamp, or promotion of the whole queue fails.
        ('rate_limit', 1, 2147483647), ('rate_period', 0.000001, 366 * 86400), ('rate_burst', 1, 100000),
        ('breaker_threshold', 1, 2147483647), ('breaker_cooldown', 0.000001, 366 * 86400),
        ('short_slots', 1, 1000000), ('short_under', 0.001, 1000000), ('short_idle', 0, 366 * 86400),
        ('budget', 0, 1000000000000000), ('budget_period', 1, 366 * 86400),
        ('ready_target', 1, 1000000), ('max_attempts', 1, 1000000), ('priority', -1000000, 1000000),
        ('cost', 0.001, 1000000), ('timeout', 0.000001, 1000000000),
        ('retry_base', 0, 366 * 86400), ('retry_cap', 0, 366 * 86400), ('retention', 0, 36525 * 86400::bigint),
        ('shard_count', 1, 4096), ('payload_limit', 1, 268435456)
    ) b(name, least, most) on b.name = regexp_replace(e.key, '^(group|user)_', '')
    order by e.key
  loop
    if v_setting.input is null then
      execute 'select to_jsonb(' || coalesce(v_setting.preset, 'null::text') || ')' into v_value;
      v_changes := v_changes || jsonb_build_object(v_setting.name, v_value);
      continue;
    end if;

    v_value := v_setting.value;
    v_fits := jsonb_typeof(v_value) = case v_setting.type when 'boolean' then 'boolean' when 'text' then 'string' else 'number' end
      or v_setting.type = 'interval' and jsonb_typeof(v_value) = 'string';
    if v_fits then
      begin
        v_number := case v_setting.type
          when 'integer' then v_setting.input::integer
          when 'double precision' then v_setting.input::double precision
          when 'interval' then extract(epoch from v_setting.input::interval)
        end;
        v_fits := coalesce(v_number between v_setting.least and v_setting.most, case v_setting.name
            when 'fairness' then v_setting.input in ('count', 'time', 'cost')
            when 'notify' then true
            when 'owner' then octet_length(v_setting.input) <= 200
            else exists (select from pg_catalog.pg_roles r where r.rolname = v_setting.input)
          end)
          and (v_setting.type <> 'interval' or fairq._is_span(v_setting.input::interval, make_interval(secs => v_setting.most)));
      exception when data_exception then
        v_fits := false;
      end;
    end if;
    if not v_fits then
      raise exception 'setting % of % cannot be %', v_setting.name, p_of, left(v_value::text, 60)
        using errcode = case v_setting.type when 'interval' then 'QF009' when 'integer' then 'QF007' when 'double precision' then 'QF007' else 'QF014' end,
          hint = case v_setting.type
            when 'integer' then format('A whole number, %s to %s', v_setting.least, v_setting.most)
            when 'double precision' then format('A number, %s to %s', v_setting.least, v_setting.most)
            when 'interval' then format('A text such as "5 minutes", or a number of seconds: %s, at most %s days',
              case v_setting.least when 0 then 'zero or more' when 1 then 'at least a second' else 'more than zero' end, trunc(v_setting.most / 86400))
            when 'boolean' then 'true or false'
            else case v_setting.name
              when 'fairness' then 'count (as many tasks for each), time (as many worker seconds) or cost (as much of what handlers charge)'
              when 'owner' then 'The name of an app, up to 200 bytes'
              else 'The name of a role that exists'
            end
          end || '; null removes the setting.',
          column = v_setting.name;
    end if;
    if v_setting.type = 'interval' then
      -- An interval of a hundred thousand years less as many in days is zero, but no date can take both parts: so it is stored as days and seconds.
      v_value := to_jsonb(justify_hours(make_interval(secs => v_number)));
    end if;
    v_changes := v_changes || jsonb_build_object(v_setting.name, v_value);
  end loop;

  for v_setting in
    select g.of || c.rule as rule, g.of || c.time as time, g.of || c.extra as extra, c.preset
    from (values (''), ('group_'), ('user_')) g(of)
    cross join (values ('rate_limit', 'rate_period', 'rate_burst', '1 second'), ('breaker_threshold', 'breaker_cooldown', null, '1 minute'),
      ('short_slots', 'short_idle', 'short_under', '1 minute'), ('budget', 'budget_period', null, '1 day'))
      c(rule, time, extra, preset)
  loop
    if (p_row || v_changes) ->> v_setting.rule is not null then
      if (p_row || v_changes) ->> v_setting.time is null then
        v_changes := v_changes || jsonb_build_object(v_setting.time, v_setting.preset);
      end if;
      continue;
    end if;
    if v_changes ->> v_setting.time is not null then
      raise exception 'setting % of % has no effect without %', v_setting.time, p_of, v_setting.rule
        using errcode = 'QF007', hint = format('Set %s as well.', v_setting.rule), column = v_setting.time;
    end if;
    if v_changes ? v_setting.rule then
      v_changes := jsonb_build_object(v_setting.time, null, coalesce(v_setting.extra, v_setting.time), null) || v_changes;
    end if;
  end loop;
  if ((p_row || v_changes) ->> 'short_slots')::integer >= ((p_row || v_changes) ->> 'max_running')::integer then
    raise exception '% keeps % slots for short tasks, and has a cap of %', p_of, (p_row || v_changes) ->> 'short_slots', (p_row || v_changes) ->> 'max_running'
      using errcode = 'QF007', hint = 'Keep fewer, or raise the cap: long tasks need one as well.', column = 'short_slots';
  end if;
  return v_changes;
end;
$$;

-- Raises QF014 for a budget of a queue, or of a group of it, where groups share by count.
create function fairq._check_unit(p_queue fairq.queues, p_budget double precision) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_queue.fairness = 'count' and p_budget is not null then
    raise exception 'a budget of % has no effect where groups share by count, as in queue "%"', p_budget, p_queue.queue
      using errcode = 'QF014', hint = 'A budget is in what groups share: set fairness to cost, or to time. To limit how many tasks start, set a rate.';
  end if;
end;
$$;

-- Raises QF014 when the settings are not an object, or name an unknown one. The hint names the known setting that shares most pairs of letters with it.
create function fairq._check_names(p_of text, p_settings jsonb, p_known text[]) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_strange text;
begin
  if jsonb_typeof(p_settings) <> 'object' then
    raise exception 'the settings of % are not an object but %', p_of, left(p_settings::text, 60)
      using errcode = 'QF014', hint = 'Names and values, for example: {"max_running": 5}.';
  end if;
  select s.name into v_strange from jsonb_object_keys(p_settings) s(name) where s.name <> all(p_known) order by s.name limit 1;
  if found then
    raise exception '% has no setting "%"', p_of, left(v_strange, 60)
      using errcode = 'QF014', hint = format('Did you mean %s? Known settings: %s.', (
        select k.name from unnest(p_known) with ordinality k(name, nth)
        order by (select count(*) from generate_series(1, length(k.name) - 1) i where strpos(v_strange, substr(k.name, i, 2)) > 0)
          / (length(k.name) + length(v_strange))::double precision desc, k.nth
        limit 1
      ), array_to_string(p_known, ', '));
  end if;
end;
$$;

-- "weight = ($1).weight, ...": so a statement that writes settings need not name them.
create function fairq._assignments(p_changes jsonb) returns text
language sql immutable set search_path = pg_catalog, pg_temp
as $$ select string_agg(format('%1$I = ($1).%1$I', c.name), ', ') from jsonb_object_keys(p_changes) c(name) $$;

-- Writes the settings of a group, of one of its users, or of a concurrency key (queue #keys). It rings, so that the lane looks its policy up again.
-- Returns the settings in force. Raises QF007, QF009, QF014 (see _check_settings). Locks: groups, one row.
create function fairq._set_limits(
  p_shard_no integer, p_queue text, p_group_key text, p_of text, p_settings jsonb, p_known text[] default null, p_user_key text default null
) returns fairq.groups
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_group fairq.groups;
  v_changes jsonb;
begin
  insert into fairq.groups (shard_no, queue, group_key, user_key) values (p_shard_no, p_queue, p_group_key, coalesce(p_user_key, '')) on conflict do nothing;
  select g.* into v_group from fairq.groups g
  where g.shard_no = p_shard_no and g.queue = p_queue and g.group_key = p_group_key and g.user_key = coalesce(p_user_key, '')
  for update;

  v_changes := fairq._check_settings(p_of, 'fairq.groups', to_jsonb(v_group), p_settings, p_known);
  if v_changes <> '{}' then
    v_group := jsonb_populate_record(v_group, v_changes);
    execute 'update fairq.groups g set ' || fairq._assignments(v_changes) || ' where g.shard_no = $2 and g.queue = $3 and g.group_key = $4 and g.user_key = $5'
    using v_group, p_shard_no, p_queue, p_group_key, v_group.user_key;
  end if;
  perform fairq._ring_group(p_shard_no, p_queue, p_group_key, p_user_key);
  return v_group;
end;
$$;

-- Applies changed limits of a whole queue ('queue NAME') or of the cluster. A first cap or breaker counts the tasks that are held already; maintain counts
-- those being popped at this moment, when the transactions that run now have ended. The caller holds the meter, which has heard all news under the old limits.
-- Locks: held tasks with "skip locked"; queues whose pops have to ask the meters from now on, or no longer.
create function fairq._apply_meter(p_scope text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._ring_group(0, '#' || p_scope, p_scope);
  perform fairq._count_held(p_scope);
  -- Before this commits, nobody can say from which transaction on all pops know the limits, see _keep_meter.
  delete from fairq.sweeps w where w.shard_no = 0 and w.what = 'count held #' || p_scope;
  perform fairq._set_sweep_floor(0, 'count held #' || p_scope, 0);
  perform fairq._settle_meter(p_scope, fairq._now());
  update fairq.queues q
  set metered = not q.metered
  where not q.internal and q.metered <> exists (select from fairq._meters(q.queue));
end;
$$;

-- Makes held tasks take a place of a meter, if by the present settings it counts; otherwise makes them give theirs back.
-- Locks: held tasks with "skip locked"; the caller holds the meter. Cost: all held tasks.
create function fairq._count_held(p_scope text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_counts boolean := fairq._counts(fairq._policy_of(0, '#' || p_scope, p_scope));
  v_bit integer := case when p_scope = 'cluster' then 2 else 1 end;
  v_adopted integer;
begin
  with held as materialized (
    select k.id, k.shard_no
    from fairq._shards(null) s(shard_no)
    join fairq.held k on k.shard_no = s.shard_no
    join fairq.tasks t on t.shard_no = k.shard_no and t.id = k.id
    where (p_scope = 'cluster' or t.queue = substr(p_scope, 7))
      and (k.meters & v_bit <> 0) <> v_counts
    for update of k skip locked
  ),
  gone as (
    delete from fairq.held k using held h where k.shard_no = h.shard_no and k.id = h.id returning k
  ),
  changed as (
    insert into fairq.held as n
    select r.*
    from gone g
    cross join lateral jsonb_populate_record(g.k, jsonb_build_object('meters', case when v_counts then (g.k).meters | v_bit else (g.k).meters & ~v_bit end)) r
    returning n.id
  )
  select count(*)::integer into v_adopted from changed;
  if v_adopted > 0 then
    insert into fairq.rings (shard_no, queue, group_key, freed)
    values (0, '#' || p_scope, p_scope, case when v_counts then -v_adopted else v_adopted end);
  end if;
end;
$$;

-- A row of settings as an object, with intervals in seconds, so that the answer can be set again. It is a form that all drivers read alike.
create function fairq._settings_json(p_row anyelement) returns jsonb
language sql stable set search_path = pg_catalog, pg_temp as $$
  select jsonb_object_agg(e.key, case when a.atttypid = 'interval'::regtype then to_jsonb(extract(epoch from (e.value #>> '{}')::interval)) else e.value end)
  from jsonb_each(to_jsonb(p_row)) e
  join pg_catalog.pg_type t on t.oid = pg_typeof(p_row)
  join pg_catalog.pg_attribute a on a.attrelid = t.typrelid and a.attname = e.key
$$;
