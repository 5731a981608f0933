"""Stop a session between any two statements of the engine's functions, and see what others do meanwhile.

The engine knows nothing of it: the functions of one test database are replaced by themselves, with a look at
a session setting after each statement. `if … then null; end if;` leaves FOUND and ROW_COUNT alone.
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
  if current_setting('stops.record', true) = 'on' then
    raise notice 'stop %', p_point;
  end if;
  if current_setting('stops.at', true) = p_point then
    perform set_config('stops.at', '', false);
    perform pg_advisory_lock({GATE});
    perform pg_advisory_unlock({GATE});
  end if;
  return false;
end;
$$;
"""


def with_stops(name: str, body: str) -> str:
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
            stop = start.end() + token.end()
            out += [body[at:stop], f" if stops.pass('{name}:{number}') then null; end if;"]
            at = stop
    return "".join([*out, body[at:]])


def install_stops(conn: Conn) -> None:
    """Give every function that writes, of this database, its stops."""
    conn.execute(SETUP)
    for name, definition, body in plpgsql_functions(conn, "v"):
        conn.execute(definition.replace(body, with_stops(name, body)).encode())


def plpgsql_functions(conn: Conn, volatility: str = "vs") -> list[tuple[str, str, str]]:
    """Name, definition and body of each but those that only refuse."""
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
    """The stops that the session passes meanwhile, each once, in order."""
    points: list[str] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        point = (diagnostic.message_primary or "").removeprefix("stop ")
        if diagnostic.message_primary != point and point not in points:
            points.append(point)

    conn.add_notice_handler(note)
    conn.execute("set stops.record = on")
    yield points
    conn.execute("set stops.record = off")
    conn.remove_notice_handler(note)
