"""Create, look at, cancel and retry tasks in the caller's own transaction, on whatever connection that has.

`enqueue`, `enqueue_many` and `cancel` have one name each. On a sync connection they return the answer, on an
async one a coroutine: `await fairq.enqueue(conn, …)`. One name, because the call reads the same in both
worlds and the connection already says which one it is; overloads tell the type checker, and a forgotten
`await` is an error there (`unused-coroutine`) and a warning at run time that names the function.

What only the server knows (unknown queue, payload limit, idempotency key) fails there and aborts the
transaction like every error of PostgreSQL; put the call in a savepoint to survive it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypeVar, Unpack

from fairq.codec import encode
from fairq.connections import Steps, on_connection
from fairq.driver import Call
from fairq.errors import NoSuchTask, NotEncodable, OutOfRange, UnknownOutcome
from fairq.options import (
    OF_ITEMS,
    EnqueueManyOptions,
    EnqueueOptions,
    GroupKey,
    Item,
    check_id,
    check_text,
    group_text,
    moment,
    options_of,
    pair,
    refuse_unknown,
    sent,
)
from fairq.queries import client as queries

__all__ = ["cancel", "cancel_many", "enqueue", "enqueue_many", "explain", "get", "retry", "retry_many"]
__all__ += ["Explanation", "Item", "TaskInfo", "create_call", "create_many_call", "traced"]

T = TypeVar("T")

# PostgreSQL holds a value of at most 1 GiB in memory; the array of payloads is one, and needs some room.
LARGEST_CALL = 512 * 2**20


@on_connection
def enqueue(
    group_key: GroupKey, payload: Any = None, **options: Unpack[EnqueueOptions]
) -> Call[int] | Steps[int]:
    """Create a task in the transaction of `conn`, and return its id.

    The task exists when that transaction commits; when it rolls back, it never did.
    """
    refuse_unknown("enqueue", options, EnqueueOptions)
    text = encode(payload)
    return traced(lambda given: create_call(group_key, text, given), options)


@on_connection
def enqueue_many(
    items: Iterable[tuple[GroupKey, Any] | Item], **options: Unpack[EnqueueManyOptions]
) -> Call[list[int]] | Steps[list[int]]:
    """Create many tasks with one statement in one round trip, and return their ids in the order of `items`.

    Each item is a pair of group key and payload, or an `Item`. All of them are created, or none.
    """
    refuse_unknown("enqueue_many", options, EnqueueManyOptions)
    return traced(lambda given: create_many_call(items, given), options)


TaskInfo: TypeAlias = queries.GetTaskRow
Explanation: TypeAlias = queries.ExplainTaskRow


@on_connection
def get(id: int) -> Call[TaskInfo]:
    """What is known of a task, live or ended, but for its payload and result; `state` is its state, or its
    outcome. Raises NoSuchTask. Needs the rights of `fairq_observe`, or of workers.
    """
    return queries.get_task.call(id=check_id(id)).then(lambda row: _there(id, row))


@on_connection
def explain(id: int) -> Call[Explanation]:
    """Why a task waits, as the engine sees it. Raises NoSuchTask. Rights as for `get`."""
    return queries.explain_task.call(id=check_id(id)).then(lambda row: _there(id, row))


def _there(id: int, row: T | None) -> T:
    if row is None:
        raise NoSuchTask(id)
    return row


@on_connection
def retry(id: int) -> Call[bool]:
    """Run an ended task again, with one attempt more than it had, or one that waits for its time now. False:
    there is nothing to be done. Raises IdempotencyConflict when another task has its idempotency key. Needs
    the rights of `fairq_admin`.
    """
    return queries.retry_task.call(id=check_id(id), strict=True)


@on_connection
def cancel(id: int) -> Call[bool]:
    """Cancel a task when the transaction of `conn` commits. False: it has ended already, or never was.

    A waiting task never runs. A running one is told, by `ctx.cancelled`, and by `asyncio.CancelledError` if
    async.
    """
    return queries.cancel.call(id=check_id(id))


@on_connection
def cancel_many(
    queue: str, *, group_key: GroupKey | None = None, kind: str | None = None, dry_run: bool = False
) -> Call[int]:
    """Cancel all live tasks of a queue, or those of a group, of a kind, and return how many these are. With
    `dry_run` only count them. Needs the rights of `fairq_admin`.

    Everything that a group has waiting ends sooner by `purge_group`.
    """
    return queries.cancel_many.call(**_filter(queue, group_key, kind), dry_run=bool(dry_run))


@on_connection
def retry_many(
    queue: str,
    *,
    group_key: GroupKey | None = None,
    kind: str | None = None,
    outcome: Literal["failed", "cancelled", "expired"] = "failed",
    since: datetime | None = None,
    dry_run: bool = False,
) -> Call[int]:
    """Run all failed tasks of a queue again, or those of a group, of a kind, with another outcome, that ended
    since a time, and return how many these are. With `dry_run` only count them. Rights as for `retry`.
    """
    if outcome not in ("failed", "cancelled", "expired"):
        raise UnknownOutcome(f"the outcome is {outcome!r:.60}", "failed, cancelled or expired.")
    ended_since = None if since is None else moment("since", since)
    return queries.retry_many.call(
        **_filter(queue, group_key, kind), outcome=outcome, since=ended_since, dry_run=bool(dry_run)
    )


def _filter(queue: str, group_key: GroupKey | None, kind: str | None) -> dict[str, Any]:
    return {
        "queue": check_text("queue", queue, 200),
        "group_key": None if group_key is None else group_text(group_key),
        "kind": None if kind is None else check_text("kind", kind, 200),
    }


# --- The calls behind them -------------------------------------------------------------------------

# From the options of tasks to the call that creates them.
Make: TypeAlias = Callable[[Mapping[str, Any]], Call[T]]
# Set by `fairq.otel`: adds headers to the options, and is there until the call has its answer.
tracing: Callable[[Make[Any], Mapping[str, Any]], Steps[Any]] | None = None


def traced(make: Make[T], options: Mapping[str, Any]) -> Call[T] | Steps[T]:
    return make(options) if tracing is None else tracing(make, options)


def create_call(group_key: GroupKey, payload: str, options: Mapping[str, Any]) -> Call[int]:
    """`fairq.create_task` with a payload that is JSON text already."""
    return queries.enqueue.call(group_key=group_text(group_key), payload=payload, **sent(options))


def create_many_call(
    items: Iterable[tuple[GroupKey, Any] | Item],
    options: Mapping[str, Any],
    encode_payload: Callable[[Any, str], str] = encode,
) -> Call[list[int]]:
    """`fairq.create_tasks`: one array per column; those that nobody uses stay null."""
    for_all = sent(options)
    send = {name: options_of(EnqueueOptions)[name].send for name in OF_ITEMS}
    group_keys: list[str] = []
    payloads: list[str] = []
    each: dict[str, dict[int, Any]] = {name: {} for name in OF_ITEMS}
    for position, item in enumerate(items):
        if isinstance(item, Item):
            group_key, payload = item.group_key, item.payload
            for name, check in send.items():
                value = getattr(item, name)
                if value is not None and check is not None:
                    each[name][position] = check(name, value)
        else:
            group_key, payload = pair(item, position)
        group_keys.append(group_text(group_key))
        try:
            payloads.append(encode_payload(payload, "payload"))
        except NotEncodable as exc:
            raise NotEncodable(f"items[{position}].{exc.path}", exc.reason, exc.hint) from exc.__cause__

    size = sum(map(len, payloads))
    if size > LARGEST_CALL:
        raise OutOfRange(
            f"the payloads of one call have {size:,} bytes, {LARGEST_CALL:,} are possible",
            "Split it into several calls; in one transaction they are all or nothing as well.",
        )
    columns: dict[str, Any] = {
        f"{name}_each": [values.get(position) for position in range(len(group_keys))]
        for name, values in each.items()
        if values
    }
    return queries.enqueue_many.call(group_keys=group_keys, payloads=payloads, **for_all, **columns)
