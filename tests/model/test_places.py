"""A key's place is held by one row, given back by that row, and given to one who waits (I7, I13).

As in test_hearing.py: the model passes every interleaving, rules with a mistake do not, and real sessions
take the shortest way to each.
"""

import os

import psycopg
import pytest

from tests.model.explorer import Found, Step, explore
from tests.model.places import Rule, State, Task, steps, wrong
from tests.support.calls import Conn, Held, column, create, finish, one, pop, promote, register, release, run
from tests.support.database import Database
from tests.support.invariants import assert_sound, hear_all, violations

LARGE = State((Task(),) * 3, (True,) * 3, (4, 4))
START = LARGE if os.environ.get("FAIRQ_TEST_MODEL") else LARGE._replace(turns=(3, 2))

BROKEN = {
    "freed by key, not by row": Rule(by_key=True),
    "kept by who was given it": Rule(granted_keeps=True),
    "woken before it has the place": Rule(woken_first=True),
    "kept by who comes back": Rule(released_keeps=True),
}
# The same mistake in SQL: the function, what stands there, and what would.
ROW = "coalesce(r.keyed_at is not null or k.granted or k.concurrency_key = '', r.keyed_at is not null), "
IN_SQL = {
    "freed by key, not by row": ("_end_waiting", ROW, "true, "),
    "kept by who was given it": ("_end_waiting", ROW, "false, "),
    "woken before it has the place": ("_open_keys", "v_key.gate, v_granted, p_now", "v_key.gate, 0, p_now"),
    "kept by who comes back": (
        "_give_back",
        "case when t.keyed then",
        "case when t.keyed and t.outcome <> 'released' then",
    ),
}

PLACES = """
select id from fairq.held where keyed
union all select id from fairq.ready where keyed_at is not null
union all select id from fairq.parked where granted
"""


def test_a_place_is_held_once_in_every_interleaving() -> None:
    found = explore(START, steps(Rule()), wrong(Rule()))
    assert found.wrong is None, (found.wrong, *found.trace)
    assert found.states > 10_000


def shortest(mistake: str) -> Found:
    return explore(LARGE, steps(BROKEN[mistake]), wrong(BROKEN[mistake]))


class Replay:
    """Sessions that take the steps of a trace; `most`: how many rows had the place at once."""

    def __init__(self, database: Database) -> None:
        self.observer = database.connect(autocommit=True)
        self.sessions: dict[str, Conn] = {name: database.connect() for name in ("p1", "p2")}
        self.workers = {name: register(self.observer) for name in self.sessions}
        self.tasks: dict[str, int] = {}
        self.most = 0

    def take(self, step: Step) -> None:
        name, what = step
        if what == "creates":
            self.tasks[name] = create(self.observer, name, concurrency_key="key")
            return
        if what == "cancels":
            assert one(self.observer, "select fairq.cancel_task(%s)", self.tasks[name])
            return
        conn, worker = self.sessions[name], self.workers[name]
        if what == "pops":
            pop(conn, worker)
        elif what == "promotes":
            promote(conn)
        elif what == "commits":
            conn.commit()
        elif what == "rolls back":
            conn.rollback()
        else:
            query = "select id, attempt, '' from fairq.held where worker_id = %s"
            held = [Held(*row) for row in run(conn, query, worker)]
            assert held
            (finish if what == "finishes" else release)(conn, worker, held)
        self.most = max(self.most, len(column(self.observer, PLACES)))


def replay(database: Database, trace: tuple[Step, ...]) -> Replay:
    played = Replay(database)
    for step in trace:
        played.take(step)
    for conn in played.sessions.values():
        conn.rollback()
    return played


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("mistake", BROKEN)
def test_the_real_functions_stand_the_shortest_way_to_a_mistake(database: Database, mistake: str) -> None:
    found = shortest(mistake)
    assert found.wrong
    print(found.wrong, *found.trace, sep="\n")
    played = replay(database, found.trace)
    assert played.most == (1 if "pops" in {step[1] for step in found.trace[:-2]} else 0)
    assert_sound(played.observer)


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("mistake", BROKEN)
def test_with_the_mistake_in_them_the_functions_do_not_stand_it(database: Database, mistake: str) -> None:
    name, old, new = IN_SQL[mistake]
    conn = database.connect(autocommit=True)
    definition = one(conn, "select pg_get_functiondef(%s::regproc)", f"fairq.{name}")
    assert old in definition
    conn.execute(definition.replace(old, new).encode())
    try:
        played = replay(database, shortest(mistake).trace)
        hear_all(played.observer)
    except psycopg.errors.CheckViolation as exc:
        assert exc.diag.constraint_name == "no_count_below_zero"  # noqa: PT017
    else:
        assert played.most > 1 or violations(played.observer)
