-- Runs before each step of a script, which may meet a database at another version than it was made for, or without fairq. Whoever makes the script fills in
-- the number of the lock and the version.
do $guard$
declare
  v_version text;
begin
  perform pg_advisory_xact_lock({key});
  if exists (select from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
             where n.nspname = 'fairq' and c.relname = 'schema_version') then
    execute 'select version_num from fairq.schema_version' into v_version;
  end if;
  if coalesce(v_version, 'base') <> '{version}' then
    raise exception 'this script expects fairq at {version}, the database is at %',
                    coalesce(v_version, 'base')
      using errcode = '55000',
            hint = 'Make the script that fits: fairq sql --from <version of the database>.';
  end if;
end
$guard$;
