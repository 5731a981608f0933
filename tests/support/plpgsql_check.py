"""Run plpgsql_check over all functions of fairq: `python -m tests.support.plpgsql_check`.

Exit 1 when it finds something. The extension is in none of the embedded binaries; a server of the system
that has it is started for this.
"""

import os
import sys
from pathlib import Path
from typing import Any

import psycopg

from fairq import embedded
from tests.support.schema import load_schema

CHECK = """
select p.oid::pg_catalog.regprocedure::text as function, c.lineno, c.level, c.message, c.detail, c.hint
from pg_catalog.pg_proc as p
  join pg_catalog.pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
  cross join lateral plpgsql_check_function_tb(
    p.oid,
    fatal_errors => false,
    performance_warnings => true,
    extra_warnings => true,
    security_warnings => true
  ) as c
where p.pronamespace = 'fairq'::pg_catalog.regnamespace
  and p.prorettype <> 'pg_catalog.trigger'::pg_catalog.regtype
  -- Ticks go in and come out beside other things.
  and c.message not like 'composite OUT variable %'
order by 1, 2
"""

# They lock rows in a subquery, or have to see what was committed, or written by their own statement, a moment
# ago: such a function is volatile, and the extension does not see it.
VOLATILE = (
    "fairq.held_tasks(",
    "fairq._hear(",
    "fairq._may_go_on(",
    "fairq._pick(",
    "fairq._silent_workers(",
)


def find_server() -> Path | None:
    """The newest PostgreSQL of the system that has the extension."""
    for control in sorted(
        Path("/usr/share/postgresql").glob("*/extension/plpgsql_check.control"), reverse=True
    ):
        bin_dir = Path("/usr/lib/postgresql") / control.parents[1].name / "bin"
        if (bin_dir / "initdb").exists():
            return bin_dir
    return None


def check(conn: psycopg.Connection[Any]) -> list[str]:
    """Check all functions of the schema, and return a line for each finding."""
    conn.execute("create extension plpgsql_check")
    findings = conn.execute(CHECK).fetchall()
    return [
        f"{function}, line {line or '?'}: {level}: {message}"
        + "".join(f"\n    {more}" for more in (detail, hint) if more)
        for function, line, level, message, detail, hint in findings
        if not ("marked as VOLATILE" in message and function.startswith(VOLATILE))
    ]


def count_functions(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute(
        "select count(*) from pg_catalog.pg_proc as p join pg_catalog.pg_language as l on l.oid = p.prolang "
        "where p.pronamespace = 'fairq'::pg_catalog.regnamespace and l.lanname = 'plpgsql'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def main() -> int:
    bin_dir = find_server()
    if bin_dir is None:
        print("skipped: no PostgreSQL with plpgsql_check (Debian: apt install postgresql-15-plpgsql-check)")
        return 0
    os.environ["FAIRQ_PG_BIN"] = str(bin_dir)
    with embedded.start() as server, psycopg.connect(server.dsn()) as conn:
        load_schema(conn)
        findings = check(conn)
        functions = count_functions(conn)
    print("\n".join([*findings, f"{len(findings)} findings in {functions} functions"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
