-- What `fairq doctor` asks. Each check is a transaction of its own, for this role may not be allowed it. Python judges the rows.

-- name: CheckSchemaIsOpen :one
-- Whether the role may use the schema at all. If it may not, one finding says so.
select coalesce(has_schema_privilege(to_regnamespace('fairq')::oid, 'usage'), false) as yes;

-- name: CheckSession :one
-- The session, as the server sees it.
-- fairq: not null role, isolation, read_only
select current_user::text as role, pg_backend_pid() as pid, pg_is_in_recovery() as standby,
  current_setting('default_transaction_isolation') as isolation, current_setting('default_transaction_read_only') as read_only;

-- name: CheckServer :one
-- fairq: not null version, number, fsync, full_page_writes, autovacuum, track_counts, encoding
select current_setting('server_version') as version, current_setting('server_version_num')::integer as number, current_setting('fsync') as fsync,
  current_setting('full_page_writes') as full_page_writes, current_setting('autovacuum') as autovacuum, current_setting('track_counts') as track_counts,
  current_setting('server_encoding') as encoding;

-- name: CheckTimeouts :many
-- Timeouts of this session, as they were before the doctor set its own, and of roles that work with fairq. A role's stands as somebody wrote it; null: as 1e4
-- or 0x100, which an interval does not read.
-- fairq: not null here, role, name
with said as (
  select true as here, current_user::text as role, s.name, s.reset_val || coalesce(s.unit, '') as value
  from pg_catalog.pg_settings s
  where s.name in ('statement_timeout', 'transaction_timeout', 'idle_session_timeout')
  union all
  select false, r.rolname::text, split_part(c.setting, '=', 1), split_part(c.setting, '=', 2)
  from pg_catalog.pg_db_role_setting d
  join pg_catalog.pg_roles r on r.oid = d.setrole
  cross join unnest(d.setconfig) c(setting)
  where d.setdatabase in (0, (select b.oid from pg_catalog.pg_database b where b.datname = current_database()))
    and split_part(c.setting, '=', 1) in ('statement_timeout', 'transaction_timeout', 'idle_session_timeout')
    and r.rolname <> current_user
    and exists (
      select from pg_catalog.pg_roles f
      where f.rolname in ('fairq_enqueue', 'fairq_work', 'fairq_admin') and pg_has_role(r.oid, f.oid, 'member')
    )
)
select s.here, s.role, s.name,
  case when s.value ~ '^\s*[\d.]+\s*[a-z]*\s*$' then (s.value || case when s.value ~ '[a-z]' then '' else 'ms' end)::interval end as length
from said s
order by s.here desc, s.role, s.name;

-- name: CheckRights :one
-- granted: whether fairq's roles have their rights, which a dump or a restore may leave out.
-- fairq: not null superuser, observe, granted
-- fairq: always
select r.rolsuper as superuser, f.enqueue, f.work, f.admin, has_table_privilege('fairq.queue_stats', 'select') as observe, (
    select coalesce(bool_or(has_schema_privilege(g.oid, 'fairq', 'usage')), false) from pg_catalog.pg_roles g
    where g.rolname in ('fairq_enqueue', 'fairq_work', 'fairq_observe', 'fairq_admin')
  ) as granted
from pg_catalog.pg_roles r
cross join (
  select bool_or(p.proname = 'create_task' and c.may) as enqueue,
    bool_or(p.proname = 'pop_tasks' and c.may) as work,
    bool_or(p.proname = 'configure_queue' and c.may) as admin
  from pg_catalog.pg_proc p
  cross join lateral (select has_function_privilege(p.oid, 'execute') as may) c
  where p.pronamespace = to_regnamespace('fairq')
) f
where r.rolname = current_user;

-- name: CheckQueues :many
-- fairq: not null waiting
select s.queue, s.overflow + s.queued as waiting, s.oldest_waiting_since::timestamptz as oldest_waiting_since, clock_timestamp() as now,
  q.paused_at is not null as paused
from fairq.queue_stats s
join fairq.queues q on q.queue = s.queue
order by s.queue;

-- name: CheckWorkers :many
-- fairq: not null lease, alive
select w.worker_id, w.name, w.queues, extract(epoch from w.lease)::double precision as lease, w.alive, w.circuit_open, w.circuit_trips
from fairq.worker_stats w
order by w.worker_id;

-- name: CheckKinds :many
-- Kinds that no live worker of their queue knows: workers that met such tasks gave them back, to wait for another worker.
select t.queue, t.kind, count(*) as tasks
from fairq.tasks t
where t.scheduled and t.spared > 0
  and (
    select not bool_or(coalesce(w.kinds ? t.kind, true))
    from fairq.workers w
    where w.shard_no = t.shard_no and t.queue = any(w.queues) and w.lost_at is null
  )
group by t.queue, t.kind
order by t.queue, t.kind;

-- name: CheckFairness :many
-- The worst debt in each queue in which a group waited all the time, over the last ten minutes.
-- fairq: nullable worst_debt, worst_group
select q.queue, f.worst_debt, f.worst_group
from fairq.queues q
cross join lateral fairq.fairness(q.queue) f
where q.paused_at is null
  and exists (
    select from fairq.ledger_queues l
    where l.shard_no = any(array(select d.shard_no from fairq.domains d)) and l.begins_at > clock_timestamp() - interval '3 minutes'
      and l.queue = q.queue and l.judged
  )
order by f.worst_debt desc nulls last;

-- name: CheckMaintenance :one
-- fairq: always
select (select count(*) from fairq.worker_stats w
    where clock_timestamp() - coalesce(w.beat_at, w.registered_at) - w.lease > interval '1 minute') as lost,
  (select count(*) from (select 1 from fairq.tasks t
    where t.shard_no = any(array(select d.shard_no from fairq.domains d))
      and not exists (select from fairq.held h where h.shard_no = t.shard_no and h.id = t.id)
      and t.expires_at > t.created_at and t.expires_at < clock_timestamp() - interval '5 minutes' limit 1000) e) as expired,
  (select count(*) from (select 1 from fairq.tasks t
    where t.shard_no = any(array(select d.shard_no from fairq.domains d))
      and t.scheduled and t.run_at < clock_timestamp() - interval '5 minutes' limit 1000) s) as overdue,
  s.moving_from, s.shard_count
from fairq.settings s;

-- name: CheckUpkeep :many
-- fairq: not null since, message
select f.part, min(f.failed_since) as since, min(f.message) as message
from fairq.upkeep_failures f
where f.part in (select fairq.upkeep_parts())
group by f.part
order by since, f.part;

-- name: CheckSchedules :one
select count(*) as schedules,
  count(*) filter (where s.fire_at < clock_timestamp() - interval '1 minute') as late,
  max(clock_timestamp() - s.fire_at) as behind,
  count(*) filter (where s.fire_at is null and s.paused_at is null and s.problem is null
    and s.plan_at < clock_timestamp() - interval '1 minute') as unplanned,
  count(*) filter (where s.problem is not null) as problems,
  min(format('%s of %s: %s', s.name, s.group_key, s.problem)) filter (where s.problem is not null) as problem
from fairq.schedules s;

-- name: CheckHistory :one
-- fairq: not null tomorrow
select to_regclass(format('fairq.finished_tasks_%s',
  to_char((clock_timestamp() at time zone 'UTC')::date + 1, 'YYYYMMDD'))) is not null as tomorrow;

-- name: CheckHorizon :many
-- What keeps dead rows from being removed. Only pg_monitor sees start and name of other roles' sessions.
-- fairq: not null kind, who, handle
select 'session' as kind,
  format('pid %s (%s%s)', a.pid, coalesce(nullif(a.application_name, ''), a.backend_type), coalesce(', user ' || a.usename, '')) as who,
  a.pid::text as handle, clock_timestamp() - a.xact_start as held_for, age(a.backend_xmin) as age
from pg_catalog.pg_stat_activity a
where a.backend_xmin is not null and a.pid <> pg_backend_pid() and a.backend_type <> 'autovacuum worker'
  and (a.datname is null or a.datname = current_database())
union all
select case when c.node is null then 'prepared' else 'citus' end, format('prepared transaction %s of %s', p.gid, p.owner),
  coalesce(c.node, quote_literal(p.gid)), clock_timestamp() - p.prepared, age(p.transaction)
from pg_catalog.pg_prepared_xacts p
cross join lateral (select substring(p.gid from '^citus_([0-9]+)_') as node) c
where p.database = current_database()
union all
select case when s.active then 'slot' else 'idle slot' end, format('replication slot %s', s.slot_name),
  quote_literal(s.slot_name), null, greatest(age(s.xmin), age(s.catalog_xmin))
from pg_catalog.pg_replication_slots s
where s.xmin is not null or s.catalog_xmin is not null
order by age desc;

-- name: CheckConnections :one
-- fairq: not null most, queue
select (select count(*) from pg_catalog.pg_stat_activity a where a.backend_type = 'client backend') as used,
  current_setting('max_connections')::integer as most, pg_notification_queue_usage() as queue,
  (select (array_agg(a.pid order by a.xact_start))[1] from pg_catalog.pg_stat_activity a where a.state like 'idle in transaction%') as idler;

-- name: CheckDeadRows :many
-- fairq: not null name, live, dead
select s.relname::text as name, s.n_live_tup as live, s.n_dead_tup as dead, s.last_autovacuum
from pg_catalog.pg_stat_all_tables s
where s.schemaname = 'fairq'
order by s.n_dead_tup desc;
