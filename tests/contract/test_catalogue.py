"""What the catalogue must say about the engine: shards first, comments everywhere, no surprises in functions.

The list of what is public is short and on purpose: functions without a leading underscore.
"""

import re
from typing import Any

import psycopg
import pytest

from fairq import install

Conn = psycopg.Connection[Any]

# The same everywhere, so not sharded; schema_version belongs to the migrations.
REFERENCE_TABLES = {"settings", "queues", "kinds", "moving", "schema_version"}

DOCS = install.sql_dir().parent / "docs" / "reference" / "sql"


def functions(conn: Conn) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        return cursor.execute(
            """
            select p.proname as name, p.oid::regprocedure::text as signature, l.lanname as language,
              p.prosecdef as definer, p.provolatile as volatility, p.prosrc as body,
              coalesce(p.proconfig, '{}') as settings, obj_description(p.oid, 'pg_proc') as comment,
              p.prokind as kind, p.proretset as many, p.prorettype::regtype::text as returns
            from pg_proc p
            join pg_language l on l.oid = p.prolang
            where p.pronamespace = 'fairq'::regnamespace
            order by 1
            """
        ).fetchall()


FUNCTION = re.compile(r"(?ms)((?:^--[^\n]*\n)*)^create function fairq\.(\w+)(\(.*?\$\$;)$")

# What stands above each function in its file, and its own text.
HEADS: dict[str, str] = {}
TEXTS: dict[str, str] = {}
for file in install.sql_files():
    for head, name, text in FUNCTION.findall(file.read_text("utf-8")):
        HEADS[name] = head
        TEXTS[name] = re.sub(r"--[^\n]*", "", text)


def public_names() -> list[str]:
    return sorted(name for name in HEADS if not name.startswith("_"))


def rows(conn: Conn, query: str) -> list[tuple[Any, ...]]:
    return conn.execute(query.encode()).fetchall()


# --- Shards ---------------------------------------------------------------------------


def test_every_key_and_index_starts_with_the_shard(db: Conn) -> None:
    """So that distributing the tables over machines stays a matter of configuration."""
    found = rows(
        db,
        """
        select c.relname, i.indexrelid::regclass::text,
          (select a.attname from pg_attribute a where a.attrelid = c.oid and a.attnum = i.indkey[0])
        from pg_index i
        join pg_class c on c.oid = i.indrelid
        where c.relnamespace = 'fairq'::regnamespace
        """,
    )
    assert len(found) > 20
    wrong = [
        (table, index)
        for table, index, column in found
        if column != "shard_no" and table not in REFERENCE_TABLES
    ]
    assert not wrong


def test_every_table_of_the_engine_has_the_shard_first_and_never_null(db: Conn) -> None:
    found = rows(
        db,
        """
        select c.relname from pg_class c
        where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p')
          and not exists (
            select from pg_attribute a
            where a.attrelid = c.oid and a.attname = 'shard_no' and a.attnum = 1 and a.attnotnull
              and a.atttypid = 'integer'::regtype
          )
        """,
    )
    assert {row[0] for row in found} == REFERENCE_TABLES


def test_there_are_no_triggers_rules_or_foreign_keys(db: Conn) -> None:
    """A foreign key takes shared row locks on every insert."""
    assert not rows(
        db,
        """
        select t.tgrelid::regclass::text, t.tgname::text
        from pg_trigger t join pg_class c on c.oid = t.tgrelid
        where c.relnamespace = 'fairq'::regnamespace
        """,
    )
    assert not rows(
        db,
        "select conname from pg_constraint where connamespace = 'fairq'::regnamespace and contype = 'f'",
    )
    assert not rows(
        db,
        """
        select r.rulename from pg_rewrite r join pg_class c on c.oid = r.ev_class
        where c.relnamespace = 'fairq'::regnamespace and c.relkind <> 'v'
        """,
    )


def test_sequences_serve_ids_only_and_no_table_is_special(db: Conn) -> None:
    """
    No meaning in sequence values. Of several machines each gives out its own range of a bigint
    sequence; and a column's own sequence would need rights of its own.
    """
    assert set(
        rows(
            db,
            """
            select s.seqrelid::regclass::text, s.seqtypid::regtype::text
            from pg_sequence s join pg_class c on c.oid = s.seqrelid
            where c.relnamespace = 'fairq'::regnamespace
            """,
        )
    ) == {(f"fairq.{name}", "bigint") for name in ("task_ids", "worker_ids", "ring_ids")}
    assert rows(
        db,
        """
        select a.attrelid::regclass::text, a.attname
        from pg_attribute a
        join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where c.relnamespace = 'fairq'::regnamespace and a.attnum > 0
          and (a.attidentity <> '' or pg_get_expr(d.adbin, d.adrelid) ~ 'nextval')
        """,
    ) == [("fairq.rings", "ring_id")]
    # Neither is possible on several machines, and an unlogged table is empty after a failover.
    assert not rows(
        db,
        """
        select conname from pg_constraint where connamespace = 'fairq'::regnamespace and contype = 'x'
        union all
        select relname from pg_class
        where relnamespace = 'fairq'::regnamespace and (relpersistence <> 'p' or relkind in ('f', 'm'))
        """,
    )


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_every_use_of_a_sharded_table_names_the_shard(name: str, db: Conn) -> None:
    """
    Every statement of a function is answerable by one shard. Each table or alias that a function
    reads, changes or deletes from has a condition on its shard_no.
    """
    sharded = {
        row[0]
        for row in rows(
            db,
            """
            select relname from pg_class
            where relnamespace = 'fairq'::regnamespace and relkind in ('r', 'p')
            """,
        )
    } - REFERENCE_TABLES
    text = TEXTS[name]
    missing = []
    for match in re.finditer(r"\b(?:from|join|update|using)\s+fairq\.(\w+)\s+(?:as\s+)?(\w+)?", text):
        table, alias = match[1], match[2]
        if table not in sharded:
            continue
        if not alias or not re.search(rf"\b{alias}\.shard_no\b", text):
            missing.append(match[0])
    # All shards: the check that there is nothing left, the list of groups that move, and that of shards.
    allowed = {"configure_cluster", "_begin_move", "_rotate_partitions"}
    everywhere = {"fairq.maintenance", "fairq.finished_tasks_default", "fairq.attempts_default"}
    missing = [use for use in missing if name not in allowed and not any(one in use for one in everywhere)]
    assert not missing


# --- Functions ------------------------------------------------------------------------------------


def test_each_public_function_has_a_file_and_there_are_no_overloads(db: Conn) -> None:
    """STYLE 3: a second function of the same name would make old calls ambiguous."""
    names = [function["name"] for function in functions(db)]
    assert len(names) == len(set(names))
    homes = {
        name: file.stem
        for file in install.sql_files()
        for name in re.findall(r"(?m)^create function fairq\.(\w+)", file.read_text("utf-8"))
    }
    assert set(names) == set(homes)
    # What stands with another one in one file says so here.
    together = {"upkeep_parts": "maintain"}
    public = {name: home for name, home in homes.items() if not name.startswith("_")}
    assert public == {name: together.get(name, name) for name in public}


def test_every_function_says_what_it_is_for(db: Conn) -> None:
    """Above it in its file; for public functions also in the database, where `\\df+` shows it."""
    assert len(HEADS) > 50
    assert [name for name, head in HEADS.items() if not head] == []
    commented = {function["name"] for function in functions(db) if function["comment"]}
    assert commented == set(public_names())


def test_public_functions_run_with_the_rights_of_the_owner_and_no_others(db: Conn) -> None:
    """So roles need no rights to tables, and callers' names cannot redirect private calls."""
    definers = [function["name"] for function in functions(db) if function["definer"]]
    assert definers == public_names()


def test_every_function_pins_its_search_path_or_is_made_to_be_inlined(db: Conn) -> None:
    """Inlined: language sql, and no more than one statement; for helpers only, never for what users call."""
    for function in functions(db):
        # pg_temp is named, and last: unnamed it comes first, and a caller's temporary type is taken for text.
        if "search_path=pg_catalog, pg_temp" not in function["settings"]:
            assert function["language"] == "sql", function["name"]
            assert function["name"].startswith("_"), function["name"]
            statement = re.sub(r"--[^\n]*", "", function["body"]).strip().rstrip(";")
            assert ";" not in statement, function["name"]


def test_nothing_is_compiled_for_a_single_call(db: Conn) -> None:
    """Costs estimated without statistics would start the JIT compiler, which takes seconds."""
    public = [f for f in functions(db) if not f["name"].startswith("_") and f["language"] == "plpgsql"]
    assert {f["name"] for f in public if "jit=off" not in f["settings"]} == set()


WRITES = re.compile(
    r"\b(insert into|update fairq|delete from|for update|nextval|pg_notify|set_config|clock_timestamp)\b"
)


def test_volatility_is_declared_honestly(db: Conn) -> None:
    """Immutable: reads no table. Stable: writes nothing, looks at no clock, calls nothing volatile."""
    known = {function["name"]: function for function in functions(db)}
    wrong = []
    for name, function in known.items():
        body = re.sub(r"--[^\n]*|'[^']*'", "", function["body"])
        called = {callee for callee in re.findall(r"fairq\.(_?\w+)\s*\(", body) if callee in known} - {name}
        writes = bool(WRITES.search(body)) or any(known[callee]["volatility"] == "v" for callee in called)
        if function["volatility"] != "v" and (writes or "random()" in body):
            wrong.append(f"{name} writes, locks or reads the clock")
        reads = bool(re.search(r"\b(from|join)\s+(fairq|pg_catalog)\.\w+\s", body)) or any(
            known[callee]["volatility"] == "s" for callee in called
        )
        if function["volatility"] == "i" and reads:
            wrong.append(f"{name} reads tables")
    assert not wrong


def test_functions_of_the_hot_path_pin_how_they_are_planned(db: Conn) -> None:
    """Generic plans, no compilation, and no scan that depends on the statistics of the day."""
    pinned = {"plan_cache_mode=force_generic_plan", "jit=off", "enable_seqscan=off", "enable_bitmapscan=off"}
    for name in (
        "pop_tasks",
        "promote_overflow",
        "_promote",
        "finish_tasks",
        "start_tasks",
        "heartbeat",
        "maintain",
        "fire_schedules",
        "create_task",
        "create_tasks",
        "cancel_task",
    ):
        (function,) = (f for f in functions(db) if f["name"] == name)
        assert pinned <= set(function["settings"]), name


def test_functions_that_take_ctids_know_no_other_way(db: Conn) -> None:
    for function in functions(db):
        if "tid[]" in function["signature"]:
            assert {"enable_seqscan=off", "enable_bitmapscan=off", "enable_indexscan=off"} <= set(
                function["settings"]
            ), function["name"]


@pytest.mark.parametrize("name", public_names())
def test_every_public_function_has_a_reference_page(name: str) -> None:
    assert name in (DOCS / f"{name}.md").read_text("utf-8")


def test_nothing_is_granted_to_public(db: Conn) -> None:
    granted = rows(
        db,
        """
        select 'function ' || p.oid::regprocedure from pg_proc p,
          aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
        where p.pronamespace = 'fairq'::regnamespace and a.grantee = 0
        union all
        select 'relation ' || c.oid::regclass from pg_class c, aclexplode(c.relacl) a
        where c.relnamespace = 'fairq'::regnamespace and a.grantee = 0
        union all
        select 'schema' from pg_namespace n, aclexplode(n.nspacl) a
        where n.nspname = 'fairq' and a.grantee = 0
        """,
    )
    assert not granted


# --- Tables, columns, indexes ---------------------------------------------------------------------


def test_every_table_view_sequence_and_type_has_a_comment(db: Conn) -> None:
    assert not rows(
        db,
        """
        select c.oid::regclass::text from pg_class c
        where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
          and obj_description(c.oid, 'pg_class') is null
          and not (c.relispartition and c.relname ~ '_[0-9]{8}$')
        union all
        select t.oid::regtype::text from pg_type t join pg_class c on c.oid = t.typrelid and c.relkind = 'c'
        where t.typnamespace = 'fairq'::regnamespace and obj_description(t.oid, 'pg_type') is null
        """,
    )


# Names that say it all, in every table that has them; any other column is explained.
PLAIN = {
    "attempt",
    "beat_at",
    "concurrency_key",
    "cost",
    "created_at",
    "ended_at",
    "error",
    "finished_at",
    "group_key",
    "headers",
    "id",
    "idempotency_key",
    "kind",
    "max_attempts",
    "name",
    "outcome",
    "payload",
    "priority",
    "queue",
    "queues",
    "registered_at",
    "reported_at",
    "requested_at",
    "result",
    "run_at",
    "shard_no",
    "singleton",
    "slots",
    "started_at",
    "state",
    "task_id",
    "tick",
    "version",
    "worker_id",
}


def test_every_column_says_what_it_means_by_its_name_or_a_comment(db: Conn) -> None:
    found = rows(
        db,
        """
        select c.relname, a.attname
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
          and a.attnum > 0 and not a.attisdropped and col_description(c.oid, a.attnum) is null
        """,
    )
    explained = {
        row[0]
        for row in rows(
            db,
            """
            select distinct a.attname
            from pg_attribute a join pg_class c on c.oid = a.attrelid
            where c.relnamespace = 'fairq'::regnamespace and a.attnum > 0
              and col_description(c.oid, a.attnum) is not null
            """,
        )
    }
    unexplained = [f"{table}.{column}" for table, column in found if column not in PLAIN | explained]
    assert not unexplained, ", ".join(unexplained)


def test_constraints_say_what_they_guarantee(db: Conn) -> None:
    """STYLE 2: each has a chosen name, not a generated one."""
    assert not rows(
        db,
        r"""
        select conname from pg_constraint
        where connamespace = 'fairq'::regnamespace and contype = 'c' and conname ~ '_check\d*$'
        """,
    )


def test_every_index_names_what_it_is_for_in_the_schema(db: Conn) -> None:
    """A comment above each `create index` says which call goes through it."""
    text = (install.sql_dir() / "schema" / "040_indexes.sql").read_text("utf-8")
    for match in re.finditer(r"(?m)^create (?:unique )?index (\w+)", text):
        before = text[: match.start()].rstrip("\n").splitlines()[-1]
        assert before.startswith("--") or before.startswith("create index"), match[1]
