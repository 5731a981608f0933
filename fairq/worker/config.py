"""A worker's settings, their checks, and the limits that follow from them. No I/O."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

Mode = Literal["forever", "drain", "once"]
Nodes = Literal["all", "near", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times are in seconds, unless the name ends in `_ms`. Numbers are annotated with their bounds."""

    queues: tuple[str, ...] | Mapping[str, float] = ()
    """In order of priority: the first is emptied before the next is asked. Or with weights: each gets its
    share. Empty: the queues of the app's tasks, with equal shares.
    """
    concurrency: Annotated[int, 0, 100_000] = 0
    prefetch: Annotated[int, 0, 100_000] = 0
    claim_lease: Annotated[float | None, 0.1, 86_400] = None
    max_claim_batch: Annotated[int, 0, 100_000] = 0
    max_claim_per_worker: Annotated[int, 0, 100_000] = 0
    lease: Annotated[float, 1, 86_400] = 60.0
    grace: Annotated[float, 0, 86_400] = 20.0
    mode: Mode = "forever"
    """once: end after one look at the queues; drain: end when no task is left that may run."""
    nodes: Nodes = "all"
    """Which nodes of Citus to serve. all: by turns; near: first the one that `dsn` names, others with the
    slots it leaves free; own: only that one.
    """
    name: str = ""
    health: str = ""
    listen: bool = True
    """Whether to LISTEN for new tasks, or only poll."""
    listen_dsn: str | None = field(default=None, repr=False)
    """Where to LISTEN if `dsn` leads through a pooler in transaction mode."""
    notify_poll_interval_ms: Annotated[int | None, 1_000, 300_000] = None
    """Longest pause between two looks at the queues. None: 5000, or 1000 without LISTEN."""
    heartbeat_ms: Annotated[int | None, 50, 600_000] = None
    """How often to send a heartbeat, and learn of cancellations. None: 2000, at most a sixth of the lease."""
    maintain_interval_ms: Annotated[int, 0, 3_600_000] = 5000
    """How often to run the upkeep. 0: never, and fire no schedules."""
    hanging_after: Annotated[float, 0, 86_400] = 5.0
    """How long after its timeout a handler may run on before it counts as hanging."""
    db_retry_initial_ms: Annotated[int, 100, 60_000] = 500
    db_retry_max_ms: Annotated[int, 500, 300_000] = 5_000
    db_retry_max_attempts: Annotated[int, 0, 10_000] = 0
    breaker_threshold: Annotated[int, 0, 10_000] = 5
    breaker_cooldown_ms: Annotated[int | None, 100, 3_600_000] = None


# Options of the command line: the value's placeholder, and the help.
TOLD = {
    "concurrency": ("-c N", "Slots: how many tasks run at once in each process. 0: one per usable core."),
    "prefetch": ("N", "Claim this many tasks beyond the slots. Needs --claim-lease; excludes a cluster cap."),
    "claim_lease": ("SECONDS", "How long a claim of --prefetch keeps a task from other workers."),
    "max_claim_batch": (
        "N",
        "The most tasks taken from a queue at a time; with weights, from all. 0: slots plus prefetch.",
    ),
    "max_claim_per_worker": ("N", "The most tasks held but not begun. 0: as for --max-claim-batch."),
    "grace": ("SECONDS", "How long handlers may run on after TERM or INT."),
    "lease": (
        "SECONDS",
        "After this long without a heartbeat the worker is considered lost, and others get its tasks.",
    ),
    "db_retry_initial_ms": (
        "MS",
        "First pause after a failure of the database, 100 to 60000. Doubled each time, give or take 25 %.",
    ),
    "db_retry_max_ms": ("MS", "Longest of these pauses, 500 to 300000."),
    "db_retry_max_attempts": ("N", "Failures in a row after which to give up, at most 10000. 0: never."),
    "breaker_threshold": ("N", "Failures in a row after which to leave the database alone. 0: never."),
    "breaker_cooldown_ms": (
        "MS",
        "How long to leave it alone, or up to a quarter less. Default: 5000, at most a third of the lease.",
    ),
    "health": ("FILE", "Rewrite this file every few seconds while the worker lives, for probes."),
    "name": ("TEXT", "Name in the statistics. Default: host and process id."),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in force, with all defaults filled in."""

    slots: int
    prefetch: int
    claim_batch: int
    claim_per_worker: int
    heartbeat: float
    cooldown: float
    patience: float
    """How long to wait for an answer of the database."""


# The smallest and largest value of each number.
BOUNDS: dict[str, tuple[float, float]] = {
    name: get_args(hint)[1:]
    for name, hint in get_type_hints(Settings, include_extras=True).items()
    if get_origin(hint) is Annotated
}
# The bounds of a queue's weight, the same as of a group's.
WEIGHTS = (0.001, 1000)


def problems(settings: Settings) -> list[str]:
    """Everything that is wrong, one message each."""
    found: list[str] = []
    unreadable = False
    hints = get_type_hints(Settings)
    for name, (least, most) in BOUNDS.items():
        value, kinds = getattr(settings, name), {hints[name], *get_args(hints[name])}
        if value is None and NoneType in kinds:
            continue
        number = int if int in kinds else int | float
        if isinstance(value, bool) or not isinstance(value, number) or not math.isfinite(value):
            found.append(f"{name} is {value!r}, which is not a {'whole ' * (number is int)}number")
            unreadable = True
        elif not least <= value <= most:
            found.append(f"{name} is {value}; it must be {least:g} to {most:g}")
    found += _queue_problems(settings.queues)
    if settings.name and len(settings.name.encode(errors="replace")) > 200:
        found.append("name has more than 200 bytes")
    if settings.mode not in ("forever", "drain", "once"):
        found.append(f"mode is {settings.mode!r}; it must be forever, drain or once")
    if settings.nodes not in ("all", "near", "own"):
        found.append(f"nodes is {settings.nodes!r}; it must be all, near or own")
    if not unreadable:
        found += _contradictions(settings)
    return found


def _queue_problems(queues: Sequence[str] | Mapping[str, float]) -> list[str]:
    if not isinstance(queues, Mapping):
        return _name_problems(queues)
    least, most = WEIGHTS
    found = _name_problems(list(queues))
    for name, weight in queues.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            found.append(f"the weight of queue {name!r} is {weight!r}, which is not a number")
        elif not least <= weight <= most:
            found.append(f"the weight of queue {name!r} is {weight:g}; it must be {least:g} to {most:g}")
    return found


def _name_problems(names: Sequence[str]) -> list[str]:
    if isinstance(names, str):
        return [f"queues is one text, {names!r}; it must be a list of names"]
    found = [
        f"queue {name!r} is not a text of 1 to 200 bytes"
        for name in names
        if not isinstance(name, str) or not 1 <= len(name.encode(errors="replace")) <= 200
    ]
    twice = sorted({name for name in names if list(names).count(name) > 1})
    return [*found, *(f"queue {name!r} is named twice" for name in twice)]


def queues_of(texts: Sequence[str]) -> tuple[tuple[str, ...] | Mapping[str, float], list[str]]:
    """Queues from the command line, and what is wrong with them: `a` and `b` in order, or `a=3` and `b=1` by
    weight. The weight follows the last equals sign.
    """
    parts = [text.rpartition("=") for text in texts]
    if not any(sign for _, sign, _ in parts):
        return tuple(texts), []
    plain = [repr(name) for _, sign, name in parts if not sign]
    if plain:
        return (), [f"some queues have a weight, but {', '.join(plain)} not: give all of them one, or none"]
    found = _name_problems([name for name, _, _ in parts])
    weights: dict[str, float] = {}
    for name, _, text in parts:
        try:
            weights[name] = float(text)
        except ValueError:
            found.append(f"the weight of queue {name!r} is {text!r}, which is not a number")
    return ({} if found else weights), found


def _contradictions(settings: Settings) -> list[str]:
    found: list[str] = []
    if settings.db_retry_max_ms < settings.db_retry_initial_ms:
        found.append(
            f"db_retry_max_ms ({settings.db_retry_max_ms}) is less than db_retry_initial_ms"
            f" ({settings.db_retry_initial_ms})"
        )
    if settings.prefetch and settings.claim_lease is None:
        found.append("prefetch needs a claim_lease: how long a claimed task is kept from other workers")
    if settings.claim_lease is not None and not settings.prefetch:
        found.append("claim_lease needs prefetch: without it, no task is claimed ahead of time")
    if not settings.listen and settings.listen_dsn:
        found.append("listen_dsn is set, but LISTEN is switched off")
    for name in ("heartbeat_ms", "breaker_cooldown_ms"):
        value = getattr(settings, name)
        if value is not None and value > settings.lease * 1000 / 3:
            found.append(f"{name} ({value}) is more than a third of the lease ({settings.lease:g} s)")
    return found


def cores(usable: int | None = None, quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores the process may use, by its CPU affinity and its container's quota."""
    if usable is None:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    try:
        share, period = (int(number) for number in quota.read_text().split())
    except (OSError, ValueError):  # no container, or one without a quota: "max 100000"
        return usable
    return min(usable, max(1, math.ceil(share / period)))


def limits(settings: Settings) -> Limits:
    """The limits in force."""
    slots = settings.concurrency or cores()
    most = slots + settings.prefetch
    beat, rest = settings.heartbeat_ms, settings.breaker_cooldown_ms
    return Limits(
        slots=slots,
        prefetch=settings.prefetch,
        claim_batch=min(settings.max_claim_batch or most, most),
        claim_per_worker=settings.max_claim_per_worker or most,
        heartbeat=beat / 1000 if beat else min(2.0, settings.lease / 6),
        cooldown=rest / 1000 if rest else min(5.0, settings.lease / 3),
        patience=max(2.0, settings.lease / 3),
    )


def poll_interval(settings: Settings, listening: bool) -> float:
    """Longest pause between two looks at the queues, in seconds."""
    if settings.notify_poll_interval_ms is not None:
        return settings.notify_poll_interval_ms / 1000
    return 5.0 if listening else 1.0


def banner(
    worker_id: int,
    queues: Sequence[str],
    settings: Settings,
    limits: Limits,
    *,
    listening: bool,
    at: str = "",
) -> str:
    """The line that a worker prints when it starts. `at` names the node, if there are several."""
    if settings.prefetch:
        ahead = f"prefetch {limits.prefetch} with claim lease {settings.claim_lease:g}s"
    else:
        ahead = "no prefetch"
    ends = {"forever": "", "drain": ", until nothing is left", "once": ", once"}[settings.mode]
    most = f", at most {limits.claim_per_worker} waiting" if settings.max_claim_per_worker else ""
    weights = settings.queues if isinstance(settings.queues, Mapping) else {}
    names = [f"{name}={weights[name]:g}" if name in weights else name for name in queues]
    return (
        f"worker {worker_id}{at and f' at {at}'} on {','.join(names)}:"
        f" {limits.slots} slot{'s' * (limits.slots != 1)}, {ahead}, claim batch {limits.claim_batch}{most},"
        f" lease {settings.lease:g}s, {'listening' if listening else 'not listening'}, polling every"
        f" {poll_interval(settings, listening):g}s{ends}"
    )
