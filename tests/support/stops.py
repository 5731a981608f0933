"""Stop a session between any two statements of the engine's functions, and see what others do meanwhile.

The engine knows nothing of it: the functions of one test database are replaced by themselves, with a look at
a session setting after each statement: the stop to stand at, or `none`, to be told of each one passed.
`if … then null; end if;` leaves FOUND and ROW_COUNT alone.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

Conn = psycopg.Connection[Any]

GATE = 4711

SETUP = f"""
create schema stops;
create function stops.pass(p_point text) returns boolean language plpgsql set lock_timeout = 0 as $$
begin
  if current_setting('stops.at') = 'none' then
    raise notice 'stop %', p_point;
  else
    perform set_config('stops.at', '', false);
    perform pg_advisory_lock({GATE});
    perform pg_advisory_unlock({GATE});
  end if;
  return false;
end;
$$;
"""

STOP = " if stops.pass('{0}') then null; end if;"
# Almost every time nobody stops there; then it is no call.
SELDOM = STOP.replace("if", "if coalesce(current_setting('stops.at', true), '') in ('none', '{0}') and", 1)


def with_stops(name: str, body: str, stop: str = STOP) -> str:
    """The body of a PL/pgSQL function with a stop after each of its statements."""
    start = re.search(r"(?m)^begin$", body)
    end = body.rfind("\nend;")
    assert start, name
    assert end > 0, name
    out, depth, number, at = [body[: start.end()]], 0, 0, start.end()
    # What may hold a semicolon or a parenthesis that is none, or is one.
    for token in re.finditer(r"--[^\n]*|'(?:[^']|'')*'|[();]", body[at:end]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token[0] == ";" and depth == 0:
            number += 1
            end_of_it = start.end() + token.end()
            out += [body[at:end_of_it], stop.format(f"{name}:{number}")]
            at = end_of_it
    return "".join([*out, body[at:]])


def install_stops(conn: Conn) -> None:
    """Add stops to all functions of this database that write."""
    conn.execute(SETUP)
    for name, definition, body in plpgsql_functions(conn, "v"):
        conn.execute(definition.replace(body, with_stops(name, body, SELDOM)).encode())


def plpgsql_functions(conn: Conn, volatility: str = "vs") -> list[tuple[str, str, str]]:
    """Name, definition and body of each function, except those that only refuse."""
    return conn.execute(
        """
        select p.proname, pg_get_functiondef(p.oid), p.prosrc
        from pg_proc p join pg_language l on l.oid = p.prolang
        where p.pronamespace = 'fairq'::regnamespace and l.lanname = 'plpgsql'
          and p.provolatile = any(string_to_array(%s, null)) and p.proname !~ '^_(refuse|check)'
        """,
        [volatility],
    ).fetchall()


@contextmanager
def recorded(conn: Conn) -> Iterator[list[str]]:
    """The stops that the session passes inside, each once, in order."""
    points: list[str] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        point = (diagnostic.message_primary or "").removeprefix("stop ")
        if diagnostic.message_primary != point and point not in points:
            points.append(point)

    conn.add_notice_handler(note)
    conn.execute("set stops.at = 'none'")
    yield points
    conn.execute("set stops.at = ''")
    conn.remove_notice_handler(note)
