-- What `fairq migrate` asks. The schema fairq need not exist yet.

-- name: HasSchemaVersion :one
-- Whether the table of the version is there. Not to_regclass(): it reads the session's cache, which may be older than a lock that we just waited for.
select exists (
  select from pg_catalog.pg_class c
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  where n.nspname = 'fairq' and c.relname = 'schema_version'
) as yes;

-- name: SchemaVersion :one
-- The newest revision that was applied, and the oldest code that may use it.
select v.version_num, v.oldest_code
from fairq.schema_version v;

-- name: SomeRelation :one
-- A table or view in the schema fairq, if there is one.
select c.relname
from pg_catalog.pg_class c
where c.relnamespace = to_regnamespace('fairq')
order by c.relname
limit 1;

-- name: HasEncoding :one
-- Whether the database knows what its texts mean.
-- fairq: not null yes
select pg_catalog.getdatabaseencoding() <> 'SQL_ASCII' as yes;

-- name: HasCitus :one
-- Whether the database is on Citus.
select exists (select from pg_catalog.pg_extension e where e.extname = 'citus') as yes;

-- name: Blockers :many
-- Sessions that hold a lock on an object of fairq, and whose transaction is at least as old as our wait.
-- fairq: not null pid, held_by
select coalesce(l.pid, 0) as pid,
  case when l.pid is null then 'a prepared transaction (see pg_prepared_xacts)' else
    'pid ' || l.pid || ' ('
    || concat_ws(', ', nullif(a.application_name, ''), 'user ' || a.usename, a.state,
         'transaction open for ' || extract(epoch from clock_timestamp() - a.xact_start)::bigint || ' s')
    || ')'
    || coalesce(': ' || left(regexp_replace(trim(a.query), '\s+', ' ', 'g'), 120), '') end as held_by
from pg_catalog.pg_locks l
left join pg_catalog.pg_class c on c.oid = l.relation
left join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.granted
  and l.pid is distinct from pg_backend_pid()
  and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
  and (
    c.relnamespace = to_regnamespace('fairq')
    or l.locktype = 'advisory' and l.objsubid = 1
      and l.classid::bigint << 32 | l.objid::bigint = sqlc.arg(lock_key)::bigint
  )
  and coalesce(a.xact_start <= clock_timestamp() - make_interval(secs => sqlc.arg(waited_seconds)::float8), true)
group by l.pid, a.pid, a.usename, a.application_name, a.state, a.query, a.xact_start
order by a.xact_start
limit 5;
