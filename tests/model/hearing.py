"""A model of rings and ticks: writers ring, promoters hear, PostgreSQL's snapshots are between them.

`new_rings` and `hear` are `sql/promote/hear.sql`, line by line. Around them is what PostgreSQL does: ids of
transactions are given at the first write and end in any order, those of savepoints, too; a statement sees
what had committed when it began, and its own transaction; a snapshot knows of running transactions only below
the highest that has ended; the lock of a domain is held to the end. A step is a statement, or several that
nobody else can tell apart: what a transaction inserts is invisible until it ends.

A ring must be heard once: by one promotion that commits, if its own transaction does.

Left out: what the rings say, which changes nothing about who hears them; the second look at a domain full of
one group's rings; sweeps; more than one domain, for each has its own ticks; a promotion in a savepoint, and
ticks from another life of the cluster (tests/races/test_promote_overflow.py and test_rebuild.py have those).
Writers and passes are few: the mistakes known so far need two writers and one promoter.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.model.explorer import Step


class Ring(NamedTuple):
    """`row` is the transaction that wrote it, which may be a savepoint's; `xid` the one it belongs to."""

    xid: int
    ring_id: int
    row: int


class Heard(NamedTuple):
    xid: int
    ring_id: int


class Tick(NamedTuple):
    next_xid: int = 0
    heard_xid: int = 0
    heard_ring: int = 0
    pending: tuple[Heard, ...] = ()


class Snapshot(NamedTuple):
    xmax: int
    running: frozenset[int]

    def shows(self, xid: int) -> bool:
        """pg_visible_in_snapshot"""
        return xid < self.xmax and xid not in self.running


# --- sql/promote/hear.sql --------------------------------------------------------------------------


def new_rings(tick: Tick, limit: int, snapshot: Snapshot, rings: list[Ring]) -> list[Ring]:
    """`rings` are those that the statement sees."""
    found = []
    for p in tick.pending:
        if snapshot.shows(p.xid):
            found += sorted(w for w in rings if w.xid == p.xid and w.ring_id > p.ring_id)[:limit]
    found += sorted(w for w in rings if tick.next_xid <= w.xid < tick.heard_xid)[:limit]
    found += sorted(
        w for w in rings if w.xid == tick.heard_xid and w.xid >= tick.next_xid and w.ring_id > tick.heard_ring
    )[:limit]
    found += sorted(w for w in rings if w.xid >= tick.next_xid and w.xid > tick.heard_xid)[:limit]
    return found[:limit]


def hear(tick: Tick, ring: list[Ring], limit: int, own: int, snapshot: Snapshot) -> Tick:
    """The tick that has heard these new rings."""
    own_ring = max((r.ring_id for r in ring if r.xid == own), default=None)
    if own_ring is None:
        own_ring = tick.heard_ring if tick.heard_xid == own else dict(tick.pending).get(own, 0)
    last = max((Heard(r.xid, r.ring_id) for r in ring), default=None)

    if last and len(ring) >= limit and last.xid < tick.next_xid:
        return tick._replace(
            pending=tuple(
                Heard(p.xid, last.ring_id if p.xid == last.xid else own_ring if p.xid == own else p.ring_id)
                for p in sorted(tick.pending)
                if p.xid >= last.xid or p.xid == own or not snapshot.shows(p.xid)
            )
        )

    if last and len(ring) >= limit:
        next_xid = min(last.xid + 1, snapshot.xmax)
        if last.xid >= next_xid:
            heard = last
        else:
            heard = Heard(0, 0) if tick.heard_xid < next_xid else Heard(tick.heard_xid, tick.heard_ring)
    else:
        next_xid = snapshot.xmax
        last = None
        heard = Heard(own, own_ring) if own >= next_xid else Heard(0, 0)
    pending = {*snapshot.running, own, *([last.xid] if last else [])}
    return Tick(
        next_xid,
        *heard,
        tuple(
            Heard(p, last.ring_id if last and p == last.xid else own_ring if p == own else 0)
            for p in sorted(pending)
            if p < next_xid
        ),
    )


# --- The same, with a mistake ----------------------------------------------------------------------

Hear = Callable[[Tick, list[Ring], int, int, Snapshot], Tick]


def without_the_pending(tick: Tick, ring: list[Ring], limit: int, own: int, snapshot: Snapshot) -> Tick:
    """At a cut only what was heard in part is remembered, not what was running."""
    heard = hear(tick, ring, limit, own, snapshot)
    if len(ring) < limit:
        return heard
    return heard._replace(pending=tuple(p for p in heard.pending if p.xid not in snapshot.running))


def without_the_own(tick: Tick, ring: list[Ring], limit: int, own: int, snapshot: Snapshot) -> Tick:
    """The own transaction is taken for one that is running, as it would be for everybody else."""
    heard = hear(tick, ring, limit, own, snapshot)
    return heard._replace(
        heard_xid=0,
        heard_ring=0,
        pending=tuple(Heard(p.xid, 0) if p.xid == own else p for p in heard.pending),
    )


def past_the_snapshot(tick: Tick, ring: list[Ring], limit: int, own: int, snapshot: Snapshot) -> Tick:
    """The next one to hear is the one behind the own: whoever began meanwhile is forgotten."""
    return hear(tick, ring, limit, own, snapshot._replace(xmax=max(snapshot.xmax, own + 1)))


def by_the_highest(tick: Tick, ring: list[Ring], limit: int, own: int, snapshot: Snapshot) -> Tick:
    """Everything up to the last ring heard counts as heard: transactions do not end in their order."""
    last = max((Heard(r.xid, r.ring_id) for r in ring), default=Heard(tick.heard_xid, tick.heard_ring))
    return Tick(last.xid, *last)


# --- Who does what ---------------------------------------------------------------------------------


class Writer(NamedTuple):
    """Rings once, or twice, perhaps once more behind a savepoint that is rolled back; commits or not."""

    rings: int
    savepoint: bool = False
    xid: int = 0
    ended: bool = False


class Promoter(NamedTuple):
    """May write before it has the lock, as a worker's turn does that ends tasks; may ring on its own; hears
    once or more often; commits or not."""

    transactions: int
    hearings: int
    own_rings: int
    xid: int = 0
    locked: bool = False
    heard_now: int = 0
    tick: Tick = Tick()
    heard: tuple[int, ...] = ()
    # Between the two statements of a rule that has two.
    read: tuple[Ring, ...] | None = None
    deleted: frozenset[int] = frozenset()


class State(NamedTuple):
    writers: tuple[Writer, ...]
    promoters: tuple[Promoter, ...]
    limit: int
    next_xid: int = 1
    latest_ended: int = 0
    running: frozenset[int] = frozenset()
    aborted: frozenset[int] = frozenset()
    rings: tuple[Ring, ...] = ()
    tick: Tick = Tick(next_xid=1)
    # Rings that committed promotions have heard, as often as they did.
    heard: tuple[int, ...] = ()
    deleted: frozenset[int] = frozenset()

    def snapshot(self, own: int) -> Snapshot:
        return Snapshot(
            self.latest_ended + 1, frozenset(x for x in self.running if x != own and x <= self.latest_ended)
        )

    def seen(self, own: int) -> list[Ring]:
        """The rings that a statement of this transaction sees."""
        return [
            r
            for r in self.rings
            if r.row not in self.aborted
            and r.ring_id not in self.deleted
            and (r.xid == own or r.xid not in self.running)
        ]


class Rule(NamedTuple):
    """The real one, unless it says otherwise."""

    hear: Hear = hear
    # Rings are read in one statement, and the tick is made from the snapshot of another.
    two_snapshots: bool = False
    # Rings are read, and then those that are there are deleted.
    deletes: bool = False
    # The tick is read before the lock of the domain is there.
    stale: bool = False


def _begin(state: State) -> tuple[State, int]:
    xid = state.next_xid
    return state._replace(next_xid=xid + 1, running=state.running | {xid}), xid


def _ring(state: State, xid: int, row: int, count: int = 1) -> State:
    first = len(state.rings) + 1
    return state._replace(rings=state.rings + tuple(Ring(xid, n, row) for n in range(first, first + count)))


def _end(state: State, xid: int, commits: bool) -> State:
    return state._replace(
        running=state.running - {xid},
        aborted=state.aborted if commits else state.aborted | {xid},
        latest_ended=max(state.latest_ended, xid),
    )


def _writer_steps(state: State, n: int) -> Iterator[tuple[Step, State]]:
    w, name = state.writers[n], f"w{n + 1}"

    def with_writer(after: State, changed: Writer) -> State:
        return after._replace(writers=(*state.writers[:n], changed, *state.writers[n + 1 :]))

    if w.ended:
        return
    if not w.xid:
        # Equal writers come in order: it makes no difference who is called what.
        if n and state.writers[n - 1] == w:
            return
        after, xid = _begin(state)
        yield (name, "rings", str(w.rings)), with_writer(_ring(after, xid, xid, w.rings), w._replace(xid=xid))
        return
    if w.savepoint:
        after, row = _begin(state)
        after = _end(_ring(after, w.xid, row), row, commits=False)
        yield (name, "rings and rolls back to a savepoint"), with_writer(after, w._replace(savepoint=False))
    for commits in (True, False):
        after = _end(state, w.xid, commits)
        step = (name, "commits" if commits else "rolls back")
        yield step, with_writer(after, Writer(0, ended=True))


def _promoter_steps(state: State, n: int, rule: Rule) -> Iterator[tuple[Step, State]]:
    p, name = state.promoters[n], f"p{n + 1}"

    def with_promoter(after: State, changed: Promoter) -> State:
        return after._replace(promoters=(*state.promoters[:n], changed, *state.promoters[n + 1 :]))

    if not p.transactions or (n and not p.xid and state.promoters[n - 1] == p):
        return
    if p.own_rings and p.read is None:
        # Before it has the lock, before it hears, or after.
        after, xid = (state, p.xid) if p.xid else _begin(state)
        changed = p._replace(xid=xid, own_rings=p.own_rings - 1)
        if rule.stale and not p.xid:
            changed = changed._replace(tick=state.tick)
        yield (name, "rings", "1"), with_promoter(_ring(after, xid, xid), changed)
    if not p.locked:
        if not any(other.locked for other in state.promoters):
            after, xid = (state, p.xid) if p.xid else _begin(state)
            tick = p.tick if rule.stale and p.xid else state.tick
            yield (name, "locks"), with_promoter(after, p._replace(xid=xid, locked=True, tick=tick))
        return
    if p.read is not None:
        if rule.deletes:
            gone = frozenset(r.ring_id for r in state.seen(p.xid))
            changed = p._replace(deleted=p.deleted | gone)
        else:
            tick = rule.hear(p.tick, list(p.read), state.limit, p.xid, state.snapshot(p.xid))
            changed = p._replace(tick=tick)
        yield (name, "goes on"), with_promoter(state, changed._replace(read=None))
        return
    if p.heard_now < p.hearings:
        snapshot, seen = state.snapshot(p.xid), state.seen(p.xid)
        if rule.deletes:
            ring = [r for r in seen if r.ring_id not in p.deleted][: state.limit]
        else:
            ring = new_rings(p.tick, state.limit, snapshot, seen)
        changed = p._replace(heard_now=p.heard_now + 1, heard=p.heard + tuple(r.ring_id for r in ring))
        if rule.two_snapshots or rule.deletes:
            changed = changed._replace(read=tuple(ring))
        else:
            changed = changed._replace(tick=rule.hear(p.tick, ring, state.limit, p.xid, snapshot))
        yield (name, "hears"), with_promoter(state, changed)
    if p.heard_now:
        done = Promoter(p.transactions - 1, p.hearings, p.own_rings)
        committed = _end(state, p.xid, commits=True)._replace(
            tick=p.tick, heard=tuple(sorted(state.heard + p.heard)), deleted=state.deleted | p.deleted
        )
        yield (name, "commits"), with_promoter(committed, done)
        yield (name, "rolls back"), with_promoter(_end(state, p.xid, commits=False), done)


def steps(rule: Rule) -> Callable[[State], Iterator[tuple[Step, State]]]:
    def each(state: State) -> Iterator[tuple[Step, State]]:
        for n in range(len(state.writers)):
            yield from _writer_steps(state, n)
        for n in range(len(state.promoters)):
            yield from _promoter_steps(state, n, rule)

    return each


def wrong(rule: Rule) -> Callable[[State], str | None]:
    """A ring heard twice; where nobody promotes, one that the next promotion would hear again, or nobody."""

    def look(state: State) -> str | None:
        for ring_id in set(state.heard):
            if state.heard.count(ring_id) > 1:
                return f"ring {ring_id} is heard twice"
        if not any(p.locked for p in state.promoters):
            committed = {
                r.ring_id for r in state.rings if not {r.xid, r.row} & (state.running | state.aborted)
            }
            last = heard_at_last(state, rule)
            if missing := committed - {*state.heard, *last}:
                return f"ring {min(missing)} is never heard"
            if again := [n for n in last if n in state.heard or last.count(n) > 1]:
                return f"ring {min(again)} is heard twice"
            if strange := {*state.heard, *last} - committed:
                return f"ring {min(strange)} is heard, and was rolled back"
        return None

    return look


def heard_at_last(state: State, rule: Rule) -> list[int]:
    """What one more promotion hears, alone, in as many passes as it takes."""
    if rule.deletes:
        return [r.ring_id for r in state.seen(0)]
    tick, own, heard = state.tick, state.next_xid, []
    for _ in range(len(state.rings) + 1):
        ring = new_rings(tick, state.limit, state.snapshot(own), state.seen(own))
        heard += [r.ring_id for r in ring]
        tick = rule.hear(tick, ring, state.limit, own, state.snapshot(own))
        if len(ring) < state.limit:
            break
    return heard
