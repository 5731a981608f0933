"""A model of a concurrency key's one place: who has it, who waits for it, and what gives it back.

Writers create tasks with the key, and cancel them; workers pop, promote, finish and release, each call in a
transaction that commits or does not. A row says whether its task has a place. Whoever leaves rings for what
its row says; the next promotion hears that and gives the place to one who waits (`sql/policies/keys.sql`,
`sql/leave/leave.sql`).

At no time more rows have a place than there are; the counter agrees with the rows as soon as it has heard all
rings; and nobody waits while a place is free.

Left out: how rings are heard (tests/model/hearing.py), whose turn it is, several keys. A call is one step;
for the gaps between its statements there is tests/races/test_stops.py.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.model.explorer import Step

PLACES = 1
PROMOTES = ("pops", "promotes")


class Task(NamedTuple):
    """state: none, line, parked, granted, held, ended. `keyed`: its row in parked or held has a place.

    A task that was given a place and is ready for a pop is granted still.
    """

    state: str = "none"
    keyed: bool = False
    worker: int = -1
    attempt: int = 0


class Open(NamedTuple):
    """A transaction: what it changes when it commits."""

    what: str
    tasks: tuple[tuple[int, Task], ...]
    counted: int = 0
    heard: int = 0
    rings: int = 0


class State(NamedTuple):
    tasks: tuple[Task, ...]
    # What each writer may cancel, and each worker may do.
    cancels: tuple[bool, ...]
    turns: tuple[int, ...]
    wishes: frozenset[int] = frozenset()
    # The lane of the key, and what was rung and not heard.
    counted: int = 0
    unheard: int = 0
    open: tuple[Open | None, ...] = (None, None)


class Rule(NamedTuple):
    """The real one, unless it says otherwise."""

    # A task that ends while it waits frees a place because it has a key, not because its row has a place.
    by_key: bool = False
    # One that was given a place, and ends before it is served, keeps it.
    granted_keeps: bool = False
    # Who is woken takes its place later.
    woken_first: bool = False
    # Whoever comes back in line holds on to what it had.
    released_keeps: bool = False


def promote(state: State, worker: int | None, rule: Rule) -> Open:
    """A promotion, and with a worker what it hands over; without one nobody in line takes a place. It holds
    #keys; what another transaction has locked it leaves alone."""
    locked = {n for each in state.open if each for n, _ in each.tasks}
    tasks, counted, unheard = dict(enumerate(state.tasks)), state.counted, state.unheard
    while True:
        # _open_keys
        counted, unheard = counted - unheard, 0
        granted = 0
        for n, task in tasks.items():
            if task.state == "parked" and n not in locked and counted + granted < PLACES:
                tasks[n] = task._replace(state="granted", keyed=True)
                granted += 1
        counted += 0 if rule.woken_first else granted
        # _cancel_waiting
        for n, task in tasks.items():
            if n in state.wishes and n not in locked and task.state in ("line", "parked", "granted"):
                keyed = True if rule.by_key else task.keyed and not rule.granted_keeps
                unheard += keyed
                tasks[n] = Task("ended")
        # _take_keys
        for n, task in tasks.items():
            if worker is None or n in locked or task.state not in ("line", "granted"):
                continue
            if task.state == "line" and counted >= PLACES:
                tasks[n] = task._replace(state="parked")
                continue
            counted += task.state == "line" or rule.woken_first
            tasks[n] = Task("held", True, worker, task.attempt + 1)
        if not unheard:
            break
    changed = tuple((n, task) for n, task in tasks.items() if task != state.tasks[n])
    return Open("promotes" if worker is None else "pops", changed, counted, state.unheard)


def leave(state: State, worker: int, what: str, rule: Rule) -> Open | None:
    """All that a worker holds ends, or stands in line again."""
    mine = [n for n, task in enumerate(state.tasks) if task.state == "held" and task.worker == worker]
    if not mine:
        return None
    keeps = what == "releases" and rule.released_keeps
    return Open(
        what,
        tuple(
            (n, Task("ended" if what == "finishes" else "line", attempt=state.tasks[n].attempt)) for n in mine
        ),
        rings=0 if keeps else sum(state.tasks[n].keyed for n in mine),
    )


def commit(state: State, worker: int) -> State:
    done = state.open[worker]
    assert done is not None
    tasks = list(state.tasks)
    for n, task in done.tasks:
        tasks[n] = task
    state = state._replace(tasks=tuple(tasks), unheard=state.unheard - done.heard + done.rings)
    return state._replace(counted=done.counted) if done.what in PROMOTES else state


def steps(rule: Rule) -> Callable[[State], Iterator[tuple[Step, State]]]:
    def each(state: State) -> Iterator[tuple[Step, State]]:
        for n, task in enumerate(state.tasks):
            if task.state == "none":
                # Equal tasks come in order.
                tasks = (*state.tasks[:n], Task("line"), *state.tasks[n + 1 :])
                yield (f"w{n + 1}", "creates"), state._replace(tasks=tasks)
                break
            if state.cancels[n]:
                cancels = (*state.cancels[:n], False, *state.cancels[n + 1 :])
                yield (
                    (f"w{n + 1}", "cancels"),
                    state._replace(cancels=cancels, wishes=state.wishes | {n}),
                )
        for w in range(len(state.turns)):
            yield from _worker_steps(state, w, rule)

    return each


def _worker_steps(state: State, w: int, rule: Rule) -> Iterator[tuple[Step, State]]:
    def with_open(after: State, opened: Open | None) -> State:
        return after._replace(open=(*state.open[:w], opened, *state.open[w + 1 :]))

    name = f"p{w + 1}"
    if state.open[w]:
        yield (name, "commits"), with_open(commit(state, w), None)
        yield (name, "rolls back"), with_open(state, None)
    elif state.turns[w]:
        turned = state._replace(turns=(*state.turns[:w], state.turns[w] - 1, *state.turns[w + 1 :]))
        # Who pops first is p1.
        if (w == 0 or state.turns[0] < max(state.turns)) and not any(
            each and each.what in PROMOTES for each in state.open
        ):
            yield (name, "pops"), with_open(turned, promote(state, w, rule))
            yield (name, "promotes"), with_open(turned, promote(state, None, rule))
        for what in ("finishes", "releases"):
            if left := leave(state, w, what, rule):
                yield (name, what), with_open(turned, left)


def wrong(rule: Rule) -> Callable[[State], str | None]:
    def look(state: State) -> str | None:
        places = sum(task.keyed for task in state.tasks)
        if places > PLACES:
            return f"{places} tasks have the place of the key"
        if not any(state.open) and state.counted - state.unheard != places:
            return f"the counter says {state.counted - state.unheard}, the rows {places}"
        if not any(state.open):
            after = commit(state._replace(open=(promote(state, 0, rule), None)), 0)
            waiting = any(task.state == "parked" for task in after.tasks)
            if waiting and not any(task.keyed for task in after.tasks):
                return "somebody waits for a key that is free"
        return None

    return look
