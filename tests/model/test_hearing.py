"""Every ring is heard once, whatever order transactions begin, write and end in (I1, I7, I11).

The model passes every interleaving; rules with a mistake do not. The shortest way to each mistake is then
taken again by real sessions: the real functions stand it, and with the same mistake in them they do not.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from tests.model.explorer import Found, Step, explore
from tests.model.hearing import (
    Promoter,
    Rule,
    State,
    Writer,
    by_the_highest,
    past_the_snapshot,
    steps,
    without_the_own,
    without_the_pending,
    wrong,
)
from tests.support.calls import Conn
from tests.support.database import Database
from tests.support.sessions import in_background, pid_of, result, wait_until_blocked
from tests.support.stops import GATE, install_stops

LARGE = bool(os.environ.get("FAIRQ_TEST_MODEL"))
UNCUT = 9

one, two, odd = Writer(1), Writer(2), Writer(2, savepoint=True)
plain, ringing = Promoter(1, 1, 0), Promoter(1, 1, 1)

WORLDS = {
    "three writers, two promoters": State((one, one, one), (plain, plain), UNCUT),
    "three writers, two promoters, cut": State((one, one, one), (plain, plain), 1),
    "a promoter that rings": State((one, one), (ringing, plain), UNCUT),
    "a promoter that rings, cut": State((one, one), (ringing, plain), 1),
    "savepoints": State((odd, one), (plain, plain), 1),
    "promotions that hear twice": State((two, one), (Promoter(1, 2, 0), plain), 1),
}
LARGE_WORLDS = {
    "three writers, two promoters that ring": State((one, one, one), (ringing, ringing), UNCUT),
    "three writers, two promoters that ring, cut": State((one, one, one), (ringing, ringing), 1),
    "three writers that ring twice, cut": State((two, two, one), (plain, plain), 1),
    "three writers with savepoints": State((odd, one, one), (plain, plain), 1),
    "promotions that ring and hear twice": State((odd, one), (Promoter(1, 2, 1), plain), 2),
    "several promotions each": State((two, one), (Promoter(2, 1, 1), plain), 1),
}

# Where each mistake shows.
BROKEN: dict[str, tuple[Rule, State]] = {
    "two snapshots": (Rule(two_snapshots=True), State((one,), (plain,), UNCUT)),
    "deleted when heard": (Rule(deletes=True), State((one,), (plain,), UNCUT)),
    "a cut without the pending": (Rule(hear=without_the_pending), State((one, one), (plain,), 1)),
    "the own ring heard twice": (Rule(hear=without_the_own), State((), (ringing,), UNCUT)),
    "past the snapshot": (Rule(hear=past_the_snapshot), State((one,), (plain,), UNCUT)),
    "up to the highest ring": (Rule(hear=by_the_highest), State((one, one), (plain,), UNCUT)),
    "a tick from before the lock": (Rule(stale=True), State((one,), (ringing, ringing), UNCUT)),
}
# The same mistake in fairq._hear: what stands there, and what would. "Past the snapshot" shows only where no
# other session of the server ends a transaction; "a tick from before the lock" is not about this function.
IN_SQL = {
    "two snapshots": [
        ("  o_tick := p_tick;\n", "  v_snapshot := pg_current_snapshot(); o_tick := p_tick;\n")
    ],
    "deleted when heard": [("  o_tick := p_tick;\n", "  delete from fairq.rings; o_tick := p_tick;\n")],
    "a cut without the pending": [
        (
            "(select pg_snapshot_xip(v_snapshot) union",
            "(select x from pg_snapshot_xip(v_snapshot) x where v_count < p_limit union",
        )
    ],
    "the own ring heard twice": [
        ("when v_own then v_own_ring", "when v_own then 0"),
        (":= case when v_own >= o_tick.next_xid then v_own else '0' end", ":= '0'"),
    ],
    "up to the highest ring": [
        ("(select pg_snapshot_xip(v_snapshot) union select v_own union", "(select v_own union")
    ],
}


@pytest.mark.parametrize("world", [*WORLDS, *(LARGE_WORLDS if LARGE else [])])
def test_every_ring_is_heard_once_in_every_interleaving(world: str) -> None:
    found = explore({**WORLDS, **LARGE_WORLDS}[world], steps(Rule()), wrong(Rule()))
    assert found.wrong is None, (found.wrong, *found.trace)
    assert found.states > 1000


def shortest(mistake: str) -> Found:
    rule, start = BROKEN[mistake]
    return explore(start, steps(rule), wrong(rule))


@dataclass
class Replay:
    """Sessions that take the steps of a trace."""

    database: Database
    limit: int
    sessions: dict[str, Conn] = field(default_factory=dict)
    rings: int = 0
    # By session: the rings of its open transaction, and what that has heard.
    rung: dict[str, list[str]] = field(default_factory=dict)
    hears: dict[str, Counter[str]] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    heard: Counter[str] = field(default_factory=Counter)
    latest: set[str] = field(default_factory=set)

    def take(self, step: Step, next_of_this: str | None) -> None:
        name, what, *_ = step
        if name not in self.sessions:
            self.sessions[name] = self.database.connect(application_name=name)
        conn = self.sessions[name]
        if what == "rings":
            self.rung.setdefault(name, []).extend(self.ring(conn) for _ in range(int(step[2])))
        elif what.startswith("rings and"):
            conn.execute("savepoint s")
            self.ring(conn)
            conn.execute("rollback to s")
        elif what == "locks":
            conn.execute("select fairq._lock_domain(0, 'default', true)")
        elif what == "hears":
            self.hear(name, conn, stops=next_of_this == "goes on")
        elif what == "goes on":
            self.gate.execute("select pg_advisory_unlock(%s)", [GATE])
            self.note(name, result(self.stopped.pop(name)))
        else:
            (conn.commit if what == "commits" else conn.rollback)()
            rung, heard = self.rung.pop(name, []), self.hears.pop(name, Counter())
            if what == "commits":
                self.committed.update(rung)
                self.heard.update(heard)

    @property
    def gate(self) -> Conn:
        if "gate" not in self.sessions:
            self.sessions["gate"] = self.database.connect(autocommit=True)
        return self.sessions["gate"]

    def ring(self, conn: Conn) -> str:
        self.rings += 1
        ring = f"ring {self.rings}"
        # As everything that rings does; freed says how often it was heard.
        conn.execute(
            "insert into fairq.rings (shard_no, queue, group_key, freed) values (0, 'default', %s, 1)", [ring]
        )
        return ring

    def hear(self, name: str, conn: Conn, *, stops: bool = False) -> None:
        """The lock is there; the tick is read, rings are heard, the next tick is written."""
        query = """
            select coalesce(jsonb_object_agg(n.group_key, n.freed) filter (where n.freed > 0), '{}')::text,
              (fairq._write_tick(h.o_tick)).tick
            from fairq._tick(0, 'default') k
            cross join lateral fairq._hear(k, %s) h
            left join lateral unnest(h.o_news) n on true
            group by h.o_tick"""
        if not stops:
            self.note(name, conn.execute(query, [self.limit]).fetchall())
            return
        self.gate.execute("select pg_advisory_lock(%s)", [GATE])
        conn.execute("select set_config('stops.at', '_hear:1', true)")
        self.stopped[name] = in_background(conn, query, [self.limit])
        wait_until_blocked(self.gate, pid_of(conn))

    def note(self, name: str, rows: list[Any]) -> None:
        heard = json.loads(rows[0][0])
        self.latest = set(heard)
        self.hears.setdefault(name, Counter()).update(heard)

    def end(self) -> None:
        """What is open commits if it writes, else not; then somebody hears the rest."""
        for name, conn in list(self.sessions.items()):
            if name != "gate" and conn.info.transaction_status:
                self.take((name, "commits" if name.startswith("w") else "rolls back"), None)
        for _ in range(self.rings + 2):
            self.take(("last", "locks"), None)
            self.take(("last", "hears"), None)
            self.take(("last", "commits"), None)


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("limit", [1, 2, UNCUT])
def test_real_sessions_hear_what_the_model_hears(database: Database, limit: int) -> None:
    """Walks through the model that real sessions take as well."""
    random, sessions = Random(limit), dict[str, Conn]()
    for _ in range(100 if LARGE else 6):
        state = State((odd, two, one), (Promoter(2, 2, 1), ringing), limit)
        played = Replay(database, limit, sessions)
        while choices := list(steps(Rule())(state)):
            step, after = random.choice(choices)
            played.take(step, None)
            if step[1] == "hears":
                n = int(step[0][1:]) - 1
                news = after.promoters[n].heard[len(state.promoters[n].heard) :]
                # How far other sessions of the server have come decides which rings a cut leaves for later.
                same = played.latest == {f"ring {ring}" for ring in news}
                assert same if limit == UNCUT else len(played.latest) == len(news), (news, played.latest)
                if not same:
                    break
            state = after
        played.end()
        assert played.heard == Counter(dict.fromkeys(played.committed, 1))


def replay(database: Database, trace: tuple[Step, ...], limit: int) -> Replay:
    played = Replay(database, limit)
    if any(step[1] == "goes on" for step in trace):
        install_stops(played.gate)
    for n, step in enumerate(trace):
        following = next((later[1] for later in trace[n + 1 :] if later[0] == step[0]), None)
        played.take(step, following)
    played.end()
    return played


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("mistake", BROKEN)
def test_the_real_functions_stand_the_shortest_way_to_a_mistake(database: Database, mistake: str) -> None:
    found = shortest(mistake)
    assert found.wrong
    print(found.wrong, *found.trace, sep="\n")
    played = replay(database, found.trace, BROKEN[mistake][1].limit)
    assert played.heard == Counter(dict.fromkeys(played.committed, 1))
    assert played.committed


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("mistake", IN_SQL)
def test_with_the_mistake_in_them_the_functions_do_not_stand_it(database: Database, mistake: str) -> None:
    conn = database.connect(autocommit=True)
    row = conn.execute("select pg_get_functiondef('fairq._hear'::regproc)").fetchone()
    assert row is not None
    (definition,) = row
    for old, new in IN_SQL[mistake]:
        assert old in definition, old
        definition = definition.replace(old, new)
    conn.execute(definition.encode())
    played = replay(database, shortest(mistake).trace, BROKEN[mistake][1].limit)
    assert played.heard != Counter(dict.fromkeys(played.committed, 1))
