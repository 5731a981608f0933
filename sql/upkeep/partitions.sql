-- Makes the day partitions of the history up to a week ahead, and drops those past every queue's retention.
-- A day of which the default partition has rows gets none. At the first lock that is not free this gives up until the next time: otherwise every session that
-- ends a task would queue behind it.
-- Returns how many partitions it made and dropped.
-- Locks: ACCESS EXCLUSIVE on the partition it drops and on the history table, for a moment; waits at most 5 ms for it. No domain.
create function fairq._rotate_partitions() returns integer
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '5ms' set timezone = 'UTC' as $$
declare
  v_today date := (fairq._now() at time zone 'UTC')::date;
  v_parent text;
  v_key text;
  v_day date;
  v_name text;
  v_covered boolean;
  v_keep_from date;
  v_changed integer := 0;
begin
  select v_today - ceil(extract(epoch from max(q.retention)) / 86400)::integer into v_keep_from
  from fairq.queues q
  where not q.internal;

  for v_parent, v_key in values ('finished_tasks', 'finished_at'), ('attempts', 'ended_at') loop
    for v_day in select v_today + g.d from generate_series(0, 7) g(d) loop
      v_name := format('%s_%s', v_parent, to_char(v_day, 'YYYYMMDD'));
      continue when to_regclass(format('fairq.%I', v_name)) is not null;
      execute format('select exists (select from fairq.%I where %I >= $1 and %I < $2)', v_parent || '_default', v_key, v_key)
        into v_covered using v_day::timestamptz, (v_day + 1)::timestamptz;
      continue when v_covered;
      begin
        -- These two settings are not inherited, see 030_tables.sql.
        execute format('create table fairq.%I partition of fairq.%I for values from (%L) to (%L) with (toast_tuple_target = 4096)', v_name, v_parent,
          v_day::timestamptz, (v_day + 1)::timestamptz);
        execute format('alter table fairq.%I replica identity full', v_name);
        v_changed := v_changed + 1;
      exception
        when lock_not_available then
          return v_changed;
        when duplicate_table or check_violation then
          null;
      end;
    end loop;

    for v_name in
      select c.relname::text
      from pg_catalog.pg_inherits i
      join pg_catalog.pg_class c on c.oid = i.inhrelid
      where i.inhparent = format('fairq.%I', v_parent)::regclass and c.relname ~ '_[0-9]{8}$'
        and to_date(right(c.relname, 8), 'YYYYMMDD') < v_keep_from
    loop
      begin
        execute format('drop table fairq.%I', v_name);
        v_changed := v_changed + 1;
      exception when lock_not_available then
        return v_changed;
      end;
    end loop;
  end loop;
  return v_changed;
end;
$$;
