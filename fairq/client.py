"""Create, inspect, cancel and retry tasks in the caller's transaction, on the caller's connection.

On a sync connection each function returns the answer, on an async one a coroutine:
`await fairq.enqueue(conn, …)`. Overloads tell type checkers which; a forgotten `await` is an error there
(`unused-coroutine`), and at run time a warning that names the function.

Errors that only the server finds (unknown queue, payload limit, idempotency key) abort the transaction, as
every error of PostgreSQL does. Put the call in a savepoint to survive one.
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

# PostgreSQL's limit for one value is 1 GiB. The array of payloads is one value, and needs some room.
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
    """Create many tasks in one statement, all or none, and return their ids in the order of `items`.

    Each item is a pair of group key and payload, or an `Item`.
    """
    refuse_unknown("enqueue_many", options, EnqueueManyOptions)
    return traced(lambda given: create_many_call(items, given), options)


TaskInfo: TypeAlias = queries.GetTaskRow
Explanation: TypeAlias = queries.ExplainTaskRow


@on_connection
def get(id: int) -> Call[TaskInfo]:
    """Everything about a task, live or ended, except its payload and result. For an ended task `state` is its
    outcome. Raises NoSuchTask. Needs the rights of `fairq_observe` or `fairq_work`.
    """
    return queries.get_task.call(id=check_id(id)).then(lambda row: _there(id, row))


@on_connection
def explain(id: int) -> Call[Explanation]:
    """Why a task waits, as the engine sees it. Raises NoSuchTask. Needs the same rights as `get`."""
    return queries.explain_task.call(id=check_id(id)).then(lambda row: _there(id, row))


def _there(id: int, row: T | None) -> T:
    if row is None:
        raise NoSuchTask(id)
    return row


@on_connection
def retry(id: int) -> Call[bool]:
    """Run an ended task again, with one more attempt than it had, or a scheduled one now. Return whether
    there was anything to do. Raises IdempotencyConflict if another task has its idempotency key. Needs the
    rights of `fairq_admin`.
    """
    return queries.retry_task.call(id=check_id(id), strict=True)


@on_connection
def cancel(id: int) -> Call[bool]:
    """Cancel a task when the transaction of `conn` commits. False: it has already ended, or never existed.

    A waiting task never runs. A running handler is told by `ctx.cancelled`, an async one also by
    `asyncio.CancelledError`.
    """
    return queries.cancel.call(id=check_id(id))


@on_connection
def cancel_many(
    queue: str, *, group_key: GroupKey | None = None, kind: str | None = None, dry_run: bool = False
) -> Call[int]:
    """Cancel all live tasks of a queue, or only those of a group or kind, and return how many. `dry_run` only
    counts them. Needs the rights of `fairq_admin`.

    `purge_group` is faster for everything that a group has waiting.
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
    """Run the failed tasks of a queue again, and return how many. `group_key`, `kind`, `outcome` and `since`
    choose among the ended tasks; `dry_run` only counts them. Needs the rights of `fairq_admin`.
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

# Makes the call that creates tasks, from their options.
Make: TypeAlias = Callable[[Mapping[str, Any]], Call[T]]
# Set by `fairq.otel`: adds headers to the options, and puts a span around the call.
tracing: Callable[[Make[Any], Mapping[str, Any]], Steps[Any]] | None = None


def traced(make: Make[T], options: Mapping[str, Any]) -> Call[T] | Steps[T]:
    return make(options) if tracing is None else tracing(make, options)


def create_call(group_key: GroupKey, payload: str, options: Mapping[str, Any]) -> Call[int]:
    """The call of `fairq.create_task`. The payload is JSON text."""
    return queries.enqueue.call(group_key=group_text(group_key), payload=payload, **sent(options))


def create_many_call(
    items: Iterable[tuple[GroupKey, Any] | Item],
    options: Mapping[str, Any],
    encode_payload: Callable[[Any], str] = encode,
) -> Call[list[int]]:
    """The call of `fairq.create_tasks`: one array per column, null for unused columns."""
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
            payloads.append(encode_payload(payload))
        except NotEncodable as exc:
            raise NotEncodable(f"items[{position}].{exc.path}", exc.reason, exc.hint) from exc.__cause__

    size = sum(map(len, payloads))
    if size > LARGEST_CALL:
        raise OutOfRange(
            f"the payloads of one call have {size:,} bytes; the limit is {LARGEST_CALL:,}",
            "Split it into several calls; in one transaction they are still all or nothing.",
        )
    columns: dict[str, Any] = {
        f"{name}_each": [values.get(position) for position in range(len(group_keys))]
        for name, values in each.items()
        if values
    }
    return queries.enqueue_many.call(group_keys=group_keys, payloads=payloads, **for_all, **columns)
