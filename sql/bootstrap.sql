-- Runs before the first file of the engine, or the first revision: makes the schema, unless an administrator has, and
-- the table that says which revision is installed. From the column oldest_code, code that is older than the database
-- learns whether it may still work.
do $$
begin
  if to_regnamespace('fairq') is null then
    create schema fairq;
  end if;
end
$$;

create table fairq.schema_version (
  version_num text not null primary key,
  oldest_code text not null
);
comment on table fairq.schema_version is
  'The revision of this schema. Written by migrations only.';
comment on column fairq.schema_version.version_num is
  'The newest revision that was applied.';
comment on column fairq.schema_version.oldest_code is
  'Code that knows at least this revision may work with this database.';
