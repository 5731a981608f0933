"""A schema's content as text, to compare two databases and say how they differ."""

import difflib
from typing import Any

import psycopg
from psycopg import sql

# "kind name" -> aspect -> value
Catalog = dict[str, dict[str, str]]

# Each query yields the name of one thing and everything about it. Numbers that depend on how the schema
# came about (oids, attribute numbers after a dropped column) are left out; the order of columns is kept.
QUERIES = {
    "schema": """
        select n.nspname, jsonb_build_object('owner', n.nspowner::regrole, 'acl', n.nspacl::text,
                 'comment', obj_description(n.oid, 'pg_namespace'))
          from pg_namespace n where n.nspname = %(schema)s""",
    "relation": """
        select c.relname,
               jsonb_build_object('kind', c.relkind, 'owner', c.relowner::regrole, 'acl', c.relacl::text,
                 'persistence', c.relpersistence, 'options', c.reloptions, 'replica identity', c.relreplident,
                 'row security', c.relrowsecurity, 'forced', c.relforcerowsecurity,
                 'access method', (select amname from pg_am where oid = c.relam),
                 'tablespace', c.reltablespace, 'partitioned by', pg_get_partkeydef(c.oid),
                 'partition', pg_get_expr(c.relpartbound, c.oid),
                 'inherits', (select array_agg(i.inhparent::regclass::text order by i.inhseqno)
                                from pg_inherits i where i.inhrelid = c.oid),
                 'toast options', (select t.reloptions from pg_class t where t.oid = c.reltoastrelid),
                 'comment', obj_description(c.oid, 'pg_class'))
          from pg_class c where c.relnamespace = %(schema)s::regnamespace""",
    "column": """
        select c.relname || '.' || a.attname,
               jsonb_build_object('type', format_type(a.atttypid, a.atttypmod), 'not null', a.attnotnull,
                 'place', row_number() over (partition by c.oid order by a.attnum),
                 'default', pg_get_expr(d.adbin, d.adrelid),
                 'identity', a.attidentity, 'generated', a.attgenerated,
                 'collation', (select collname from pg_collation where oid = a.attcollation),
                 'storage', a.attstorage, 'compression', a.attcompression, 'statistics', a.attstattarget,
                 'options', a.attoptions, 'acl', a.attacl::text, 'comment', col_description(c.oid, a.attnum))
          from pg_class c
          join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
          left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
         where c.relnamespace = %(schema)s::regnamespace and c.relkind <> 'S'""",
    "constraint": """
        select coalesce(conrelid::regclass, contypid::regtype::oid::regclass)::text || '.' || conname,
               jsonb_build_object('definition', pg_get_constraintdef(oid), 'validated', convalidated,
                 'deferrable', condeferrable, 'deferred', condeferred, 'local', conislocal,
                 'comment', obj_description(oid, 'pg_constraint'))
          from pg_constraint where connamespace = %(schema)s::regnamespace""",
    "index": """
        select i.indexrelid::regclass::text,
               jsonb_build_object('definition', pg_get_indexdef(i.indexrelid), 'valid', i.indisvalid,
                 'clustered', i.indisclustered, 'replica identity', i.indisreplident)
          from pg_index i join pg_class c on c.oid = i.indexrelid
         where c.relnamespace = %(schema)s::regnamespace""",
    "sequence": """
        select c.relname,
               to_jsonb(s) - 'seqrelid' || jsonb_build_object('type', s.seqtypid::regtype, 'owned by',
                 (select d.refobjid::regclass::text || '.' || d.refobjsubid from pg_depend d
                   where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('a', 'i')
                     and d.refclassid = 'pg_class'::regclass and d.refobjsubid > 0))
          from pg_sequence s join pg_class c on c.oid = s.seqrelid
         where c.relnamespace = %(schema)s::regnamespace""",
    "view": """
        select c.relname, jsonb_build_object('definition', pg_get_viewdef(c.oid))
          from pg_class c where c.relnamespace = %(schema)s::regnamespace and c.relkind in ('v', 'm')""",
    "function": """
        select p.oid::regprocedure::text,
               jsonb_build_object(
                 'definition', case when p.prokind = 'a' then a.aggtransfn::text
                                    else pg_get_functiondef(p.oid) end,
                 'owner', p.proowner::regrole, 'acl', p.proacl::text, 'cost', p.procost, 'rows', p.prorows,
                 'volatility', p.provolatile, 'parallel', p.proparallel, 'strict', p.proisstrict,
                 'security definer', p.prosecdef, 'leakproof', p.proleakproof, 'settings', p.proconfig,
                 'comment', obj_description(p.oid, 'pg_proc'))
          from pg_proc p left join pg_aggregate a on a.aggfnoid = p.oid
         where p.pronamespace = %(schema)s::regnamespace""",
    "type": """
        select t.typname,
               jsonb_build_object('kind', t.typtype, 'owner', t.typowner::regrole, 'acl', t.typacl::text,
                 'labels', (select array_agg(e.enumlabel order by e.enumsortorder) from pg_enum e
                             where e.enumtypid = t.oid),
                 'base', case when t.typbasetype <> 0 then format_type(t.typbasetype, t.typtypmod) end,
                 'not null', t.typnotnull, 'default', t.typdefault,
                 'comment', obj_description(t.oid, 'pg_type'))
          from pg_type t where t.typnamespace = %(schema)s::regnamespace""",
    "trigger": """
        select t.tgrelid::regclass::text || '.' || t.tgname,
               jsonb_build_object('definition', pg_get_triggerdef(t.oid), 'enabled', t.tgenabled)
          from pg_trigger t join pg_class c on c.oid = t.tgrelid
         where c.relnamespace = %(schema)s::regnamespace and not t.tgisinternal""",
    "rule": """
        select r.ev_class::regclass::text || '.' || r.rulename,
               jsonb_build_object('definition', pg_get_ruledef(r.oid))
          from pg_rewrite r join pg_class c on c.oid = r.ev_class
         where c.relnamespace = %(schema)s::regnamespace and r.rulename <> '_RETURN'""",
    "policy": """
        select tablename || '.' || policyname, to_jsonb(p)
          from pg_policies p where schemaname = %(schema)s""",
    "statistics": """
        select s.stxname, jsonb_build_object('definition', pg_get_statisticsobjdef(s.oid))
          from pg_statistic_ext s where s.stxnamespace = %(schema)s::regnamespace""",
    "operator": """
        select o.oid::regoperator::text, jsonb_build_object('function', o.oprcode::text)
          from pg_operator o where o.oprnamespace = %(schema)s::regnamespace""",
    "default privileges": """
        select coalesce(n.nspname, '') || d.defaclobjtype::text || d.defaclrole::regrole::text,
               jsonb_build_object('acl', d.defaclacl::text)
          from pg_default_acl d left join pg_namespace n on n.oid = d.defaclnamespace""",
    "extension": """
        select extname, jsonb_build_object('schema', extnamespace::regnamespace) from pg_extension""",
    "role": """
        select r.rolname,
               to_jsonb(r) - 'oid' - 'rolpassword' || jsonb_build_object('member of',
                 (select array_agg(m.roleid::regrole::text order by m.roleid::regrole::text)
                    from pg_auth_members m where m.member = r.oid))
          from pg_roles r
         where exists (select from pg_shdepend d
                        where d.refclassid = 'pg_authid'::regclass and d.refobjid = r.oid and d.deptype = 'a'
                          and d.dbid = (select oid from pg_database where datname = current_database()))""",
}

TABLES = """
    select c.relname from pg_class c
     where c.relnamespace = %(schema)s::regnamespace and c.relkind = 'r' order by 1"""

# Points in time, transaction ids, and lists of composites with a transaction id.
MOVING = """
    select a.attname from pg_attribute a
     where a.attrelid = format('%%I.%%I', %s::text, %s::text)::regclass
       and (a.atttypid in ('timestamptz'::regtype, 'xid8'::regtype, 'xid'::regtype, 'xid8[]'::regtype)
         or exists (select from pg_type l
                      join pg_type e on e.oid = l.typelem
                      join pg_attribute f on f.attrelid = e.typrelid
                     where l.oid = a.atttypid and e.typtype = 'c' and f.atttypid = 'xid8'::regtype))"""


def catalog(conn: psycopg.Connection[Any], schema: str = "fairq") -> Catalog:
    """Everything in the schema and its first rows (except times and transaction ids)."""
    # Names are printed with their schema, whatever the path of this session.
    conn.execute("select set_config('search_path', '', false)")
    found: Catalog = {}
    if conn.execute("select to_regnamespace(%s) is null", (schema,)).fetchone() == (True,):
        return found
    for kind, query in QUERIES.items():
        for name, about in conn.execute(query.encode(), {"schema": schema}):
            found[f"{kind} {name}"] = {key: str(value) for key, value in about.items() if value is not None}
    for (table,) in conn.execute(TABLES, {"schema": schema}).fetchall():
        found[f"rows of {table}"] = {"all": "\n".join(_rows(conn, schema, table))}
    return found


def _rows(conn: psycopg.Connection[Any], schema: str, table: str) -> list[str]:
    moving = {name for (name,) in conn.execute(MOVING, (schema, table))}
    query = sql.SQL("select to_jsonb(t) from {} as t").format(sql.Identifier(schema, table))
    return sorted(
        str({key: value for key, value in row.items() if key not in moving}) for (row,) in conn.execute(query)
    )


def differences(left: Catalog, right: Catalog, left_name: str, right_name: str) -> list[str]:
    """The differences, one readable paragraph each."""
    found = []
    for thing in sorted(left.keys() | right.keys()):
        if thing not in left or thing not in right:
            found.append(f"{thing}: only {left_name if thing in left else right_name}")
            continue
        one, other = left[thing], right[thing]
        for aspect in sorted(one.keys() | other.keys()):
            before, after = one.get(aspect, ""), other.get(aspect, "")
            if before != after:
                found.append(f"{thing}: {aspect}:{_change(before, after, left_name, right_name)}")
    return found


def _change(before: str, after: str, left_name: str, right_name: str) -> str:
    if "\n" not in before + after:
        return f" {left_name} {before or '–'} · {right_name} {after or '–'}"
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), left_name, right_name, lineterm="", n=1
    )
    return "\n  " + "\n  ".join(lines)
