-- What `fairq gen` asks the catalogue of the database that it reads. That may be any, so nothing here is of fairq.

-- name: Types :many
-- All types: an array has an element, a domain a base.
select t.oid::bigint as oid, n.nspname as schema, t.typname as name, t.typtype::text as kind,
  case when t.typcategory = 'A' and t.typelem <> 0 and t.typlen = -1 then t.typelem else 0 end::bigint as element,
  t.typbasetype::bigint as base, greatest(t.typndims, 0) as base_dims, t.typnotnull as not_null
from pg_catalog.pg_type t
join pg_catalog.pg_namespace n on n.oid = t.typnamespace;

-- name: Relations :many
-- Tables, views and composite types of users; not partitions, and nothing of an extension.
select c.oid::bigint as oid, n.nspname as schema, c.relname as name, c.relkind::text as kind,
  coalesce(pg_catalog.obj_description(c.oid, 'pg_class'), '') as comment
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'f', 'c') and not c.relispartition and n.nspname not like 'pg\_%' and n.nspname <> 'information_schema'
  and not exists (
    select from pg_catalog.pg_depend d
    where d.classid = 'pg_catalog.pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
  )
order by n.nspname, c.relname;

-- name: Attributes :many
-- The columns of these, in order.
select a.attrelid::bigint as relation, a.attnum::integer as number, a.attname as name, a.atttypid::bigint as type, a.attndims::integer as dims,
  coalesce(pg_catalog.col_description(a.attrelid, a.attnum), '') as comment
from pg_catalog.pg_attribute a
join pg_catalog.pg_class c on c.oid = a.attrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where a.attnum > 0 and not a.attisdropped and c.relkind in ('r', 'p', 'v', 'm', 'f', 'c') and n.nspname not like 'pg\_%' and n.nspname <> 'information_schema'
order by a.attrelid, a.attnum;

-- name: UserTypes :many
-- Enums, domains and ranges of users.
-- fairq: not null labels
select t.oid::bigint as oid, n.nspname as schema, t.typname as name, t.typtype::text as kind,
  coalesce(pg_catalog.obj_description(t.oid, 'pg_type'), '') as comment,
  array(select e.enumlabel::text from pg_catalog.pg_enum e where e.enumtypid = t.oid order by e.enumsortorder) as labels,
  coalesce(r.rngsubtype, 0)::bigint as subtype, coalesce(r.rngmultitypid, 0)::bigint as multirange
from pg_catalog.pg_type t
join pg_catalog.pg_namespace n on n.oid = t.typnamespace
left join pg_catalog.pg_range r on r.rngtypid = t.oid
where t.typtype in ('e', 'd', 'r') and n.nspname not like 'pg\_%' and n.nspname <> 'information_schema'
order by n.nspname, t.typname;

-- name: Relation :one
-- The name of a relation, and the query of a view.
-- fairq: always
select n.nspname as schema, c.relname as name, r.ev_action::text as view
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
left join pg_catalog.pg_rewrite r on r.ev_class = c.oid and r.ev_type = '1' and r.rulename = '_RETURN'
where c.oid = sqlc.arg(oid)::bigint::oid;

-- name: RelationColumns :many
-- The columns of a relation, dropped ones included, and which are never null. A NOT NULL added as `not valid` (from 18 on) does not hold yet. Tables that
-- inherit from a table add their rows to it, and may have dropped its NOT NULL.
-- fairq: not null not_null
with recursive family as (
  select sqlc.arg(oid)::bigint::oid as oid
  union
  select i.inhrelid from pg_catalog.pg_inherits i join family f on f.oid = i.inhparent
)
select a.attnum::integer as number, a.attname as name, a.attndims::integer as dims,
  not a.attisdropped and c.relkind in ('r', 'p')
  and (
    t.typnotnull
    or (
      a.attnotnull
      and not exists (
        select from family f
        join pg_catalog.pg_constraint k on k.conrelid = f.oid
        join pg_catalog.pg_attribute b on b.attrelid = f.oid and b.attnum = k.conkey[1]
        where k.contype = 'n' and not k.convalidated and b.attname = a.attname
      )
      and not exists (
        select from family f join pg_catalog.pg_attribute b on b.attrelid = f.oid
        where b.attname = a.attname and not b.attnotnull
      )
    )
  ) as not_null
from pg_catalog.pg_attribute a
join pg_catalog.pg_class c on c.oid = a.attrelid
left join pg_catalog.pg_type t on t.oid = a.atttypid
where a.attrelid = sqlc.arg(oid)::bigint::oid and a.attnum > 0;

-- name: Function :one
-- A function: the table whose rows it returns, and the names of its arguments.
-- fairq: always
-- fairq: not null names
select n.nspname as schema, p.proname as name,
  case when p.proretset and c.relkind in ('r', 'p', 'v', 'm') then c.oid end::bigint as rows_of,
  array(
    select a.name from unnest(p.proargnames, p.proargmodes::text[]) with ordinality a(name, mode, nth)
    where coalesce(a.mode, 'i') in ('i', 'b', 'v') order by a.nth
  ) as names
from pg_catalog.pg_proc p
join pg_catalog.pg_namespace n on n.oid = p.pronamespace
join pg_catalog.pg_type t on t.oid = p.prorettype
left join pg_catalog.pg_class c on c.oid = t.typrelid
where p.oid = sqlc.arg(oid)::bigint::oid;

-- name: Operator :one
-- The name of a built-in operator; empty for a user's.
-- fairq: always
select case when n.nspname = 'pg_catalog' then o.oprname else '' end as name
from pg_catalog.pg_operator o
join pg_catalog.pg_namespace n on n.oid = o.oprnamespace
where o.oid = sqlc.arg(oid)::bigint::oid;

-- name: QuotedNames :many
-- Names as SQL has to spell them.
-- fairq: not null plain, quoted
select x as plain, quote_ident(x) as quoted from unnest(sqlc.arg(names)::text[]) x;

-- name: Tree :one
-- The tree of the function that `fairq gen` has just made of a statement.
-- fairq: always
-- fairq: not null tree
select p.prosqlbody::text as tree
from pg_catalog.pg_proc p
where p.pronamespace = pg_catalog.pg_my_temp_schema() and p.proname = 'fairq_gen';
