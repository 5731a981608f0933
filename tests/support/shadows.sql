-- Everything that the engine's functions call by an unqualified name, under the same name in the way of a session: functions and operators in a schema
-- of its own, types as temporary domains with a check, relations as temporary tables. What is called says so, and complains when it runs as somebody else.
set search_path = pg_catalog, pg_temp;
do $$
declare
  v record;
  v_made integer := 0;
begin
  create schema mine;
  create function mine.hijack() returns boolean language plpgsql set search_path = pg_catalog, pg_temp as $f$
  begin
    if current_user <> session_user then
      raise exception 'hijacked: runs as %', current_user;
    end if;
    raise notice 'in the way';
    return true;
  end $f$;
  for v in
    select p.oid, p.proname, pg_get_function_identity_arguments(p.oid) as arguments, pg_get_function_result(p.oid) as result
    from pg_catalog.pg_proc p
    where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f'
      and p.proname in (
        select called[1] from pg_catalog.pg_proc f, regexp_matches(f.prosrc, '(\w+)\(', 'g') called
        where f.pronamespace = 'fairq'::regnamespace)
  loop
    begin
      execute format('create function mine.%I(%s) returns %s language plpgsql as $f$ begin perform mine.hijack(); return null; end $f$',
        v.proname, v.arguments, v.result);
      v_made := v_made + 1;
    exception when others then null;
    end;
  end loop;
  if v_made < 50 then
    raise exception 'only % functions', v_made;
  end if;
  for v in
    select o.oprname, format_type(o.oprleft, null) as l, format_type(o.oprright, null) as r, format_type(o.oprresult, null) as result
    from pg_catalog.pg_operator o
    where o.oprnamespace = 'pg_catalog'::regnamespace and o.oprkind = 'b' and o.oprname in ('=', '<>', '<', '>', '<=', '>=', '+', '-', '||', '->>')
  loop
    begin
      execute format('create function mine.op_%s(%s, %s) returns %s language plpgsql as $f$ begin perform mine.hijack(); return null; end $f$',
        v_made, v.l, v.r, v.result);
      execute format('create operator mine.%s (leftarg = %s, rightarg = %s, function = mine.op_%s)', v.oprname, v.l, v.r, v_made);
      v_made := v_made + 1;
    exception when others then null;
    end;
  end loop;
  for v in
    select t.typname from pg_catalog.pg_type t
    where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype = 'b' and t.typname !~ '^_' and t.typname !~ '^reg'
  loop
    execute format('create domain pg_temp.%I as pg_catalog.%I check (mine.hijack())', v.typname, v.typname);
  end loop;
  for v in
    select c.relname, c.oid::regclass::text as name from pg_catalog.pg_class c
    where c.relnamespace in ('fairq'::regnamespace, 'pg_catalog'::regnamespace) and c.relkind in ('r', 'v', 'p') and not c.relispartition
  loop
    begin
      execute format('create temp table %I (check (mine.hijack()))', v.relname);
    exception when duplicate_object or duplicate_table then null; -- a domain has the name
    end;
  end loop;
end
$$;
set search_path = pg_temp, mine, fairq, pg_catalog;
