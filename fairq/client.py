"""Create and cancel tasks in the caller's own transaction, on whatever connection that has.

`enqueue`, `enqueue_many` and `cancel` have one name each. On a sync connection they return the answer, on an
async one a coroutine: `await fairq.enqueue(conn, …)`. One name, because the call reads the same in both
worlds and the connection already says which one it is; overloads tell the type checker, and a forgotten
`await` is an error there (`unused-coroutine`) and a warning at run time.

What can be judged without the database is judged before anything is sent, so a wrong argument leaves the
transaction usable. What only the server knows (unknown queue, payload limit, idempotency key) fails there and
aborts the transaction like every error of PostgreSQL; put the call in a savepoint to survive it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar, overload

from fairq.codec import encode
from fairq.connections import AsyncConnection, Call, SyncConnection, run
from fairq.errors import (
    ConfigurationError,
    InvalidCost,
    InvalidGroupKey,
    InvalidName,
    InvalidTime,
    NotEncodable,
    OutOfRange,
    is_within,
)
from fairq.queries import client as queries

__all__ = [
    "Item",
    "Options",
    "cancel",
    "cancel_call",
    "create_call",
    "create_many_call",
    "enqueue",
    "enqueue_many",
]

DEFAULT_QUEUE = "default"
DEFAULT_KIND = "default"
Seconds = float | timedelta
# PostgreSQL holds a value of at most 1 GiB in memory; the array of payloads is one, and needs some room.
LARGEST_CALL = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Options:
    """What a task may be told beside its group and payload; None takes the default."""

    queue: str = DEFAULT_QUEUE
    kind: str = DEFAULT_KIND
    priority: int = 0
    run_at: datetime | None = None
    expires_at: datetime | None = None
    max_attempts: int | None = None
    cost: float = 1.0
    timeout: Seconds | None = None
    headers: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One task of `enqueue_many`, where a pair of group key and payload does not say enough."""

    group_key: str
    payload: Any
    priority: int | None = None
    cost: float | None = None
    idempotency_key: str | None = None
    concurrency_key: str | None = None


# --- The functions ---------------------------------------------------------------------------------


@overload
def enqueue(
    conn: SyncConnection,
    group_key: str,
    payload: Any = ...,
    *,
    queue: str = ...,
    kind: str = ...,
    priority: int = ...,
    run_at: datetime | None = ...,
    expires_at: datetime | None = ...,
    max_attempts: int | None = ...,
    cost: float = ...,
    timeout: Seconds | None = ...,
    idempotency_key: str | None = ...,
    concurrency_key: str | None = ...,
    headers: Mapping[str, Any] | None = ...,
) -> int: ...
@overload
def enqueue(
    conn: AsyncConnection,
    group_key: str,
    payload: Any = ...,
    *,
    queue: str = ...,
    kind: str = ...,
    priority: int = ...,
    run_at: datetime | None = ...,
    expires_at: datetime | None = ...,
    max_attempts: int | None = ...,
    cost: float = ...,
    timeout: Seconds | None = ...,
    idempotency_key: str | None = ...,
    concurrency_key: str | None = ...,
    headers: Mapping[str, Any] | None = ...,
) -> Coroutine[Any, Any, int]: ...
def enqueue(
    conn: Any,
    group_key: str,
    payload: Any = None,
    *,
    queue: str = DEFAULT_QUEUE,
    kind: str = DEFAULT_KIND,
    priority: int = 0,
    run_at: datetime | None = None,
    expires_at: datetime | None = None,
    max_attempts: int | None = None,
    cost: float = 1.0,
    timeout: Seconds | None = None,
    idempotency_key: str | None = None,
    concurrency_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
) -> int | Coroutine[Any, Any, int]:
    """Create a task in the transaction of `conn`, and return its id.

    The task exists when that transaction commits; when it rolls back, it never did.
    """
    options = Options(queue, kind, priority, run_at, expires_at, max_attempts, cost, timeout, headers)
    call = create_call(group_key, encode(payload), options, idempotency_key, concurrency_key)
    return run(conn, call)  # type: ignore[no-any-return]


@overload
def enqueue_many(
    conn: SyncConnection,
    items: Iterable[tuple[str, Any] | Item],
    *,
    queue: str = ...,
    kind: str = ...,
    priority: int = ...,
    run_at: datetime | None = ...,
    expires_at: datetime | None = ...,
    max_attempts: int | None = ...,
    cost: float = ...,
    timeout: Seconds | None = ...,
    headers: Mapping[str, Any] | None = ...,
) -> list[int]: ...
@overload
def enqueue_many(
    conn: AsyncConnection,
    items: Iterable[tuple[str, Any] | Item],
    *,
    queue: str = ...,
    kind: str = ...,
    priority: int = ...,
    run_at: datetime | None = ...,
    expires_at: datetime | None = ...,
    max_attempts: int | None = ...,
    cost: float = ...,
    timeout: Seconds | None = ...,
    headers: Mapping[str, Any] | None = ...,
) -> Coroutine[Any, Any, list[int]]: ...
def enqueue_many(
    conn: Any,
    items: Iterable[tuple[str, Any] | Item],
    *,
    queue: str = DEFAULT_QUEUE,
    kind: str = DEFAULT_KIND,
    priority: int = 0,
    run_at: datetime | None = None,
    expires_at: datetime | None = None,
    max_attempts: int | None = None,
    cost: float = 1.0,
    timeout: Seconds | None = None,
    headers: Mapping[str, Any] | None = None,
) -> list[int] | Coroutine[Any, Any, list[int]]:
    """Create many tasks with one statement in one round trip, and return their ids in the order of `items`.

    Each item is a pair of group key and payload, or an `Item`. All of them are created, or none.
    """
    options = Options(queue, kind, priority, run_at, expires_at, max_attempts, cost, timeout, headers)
    return run(conn, create_many_call(items, options, encode))  # type: ignore[no-any-return]


@overload
def cancel(conn: SyncConnection, id: int) -> bool: ...
@overload
def cancel(conn: AsyncConnection, id: int) -> Coroutine[Any, Any, bool]: ...
def cancel(conn: Any, id: int) -> bool | Coroutine[Any, Any, bool]:
    """Cancel a task when the transaction of `conn` commits. False: it has ended already, or never was.

    A waiting task never runs. A running one is told, by `ctx.cancelled`, and by `asyncio.CancelledError` if
    async.
    """
    return run(conn, cancel_call(id))  # type: ignore[no-any-return]


# --- The calls behind them -------------------------------------------------------------------------

T = TypeVar("T")


def identity(answer: T) -> T:
    return answer


def create_call(
    group_key: str,
    payload: str,
    options: Options,
    idempotency_key: str | None = None,
    concurrency_key: str | None = None,
) -> Call[int, int]:
    """`fairq.create_task` with a payload that is JSON text already."""
    check_group_key(group_key)
    _check_key("idempotency key", idempotency_key, group_key)
    _check_key("concurrency key", concurrency_key, group_key)
    _check_options(options)
    query = queries.enqueue.call(
        group_key=group_key,
        payload=payload,
        queue=options.queue,
        kind=options.kind,
        priority=options.priority,
        run_at=_moment(options.run_at),
        expires_at=_moment(options.expires_at),
        max_attempts=options.max_attempts,
        cost=options.cost,
        timeout=interval(options.timeout),
        idempotency_key=idempotency_key,
        concurrency_key=concurrency_key,
        headers=_headers(options.headers),
    )
    return Call(query, identity)


def create_many_call(
    items: Iterable[tuple[str, Any] | Item], options: Options, encode_payload: Callable[[Any, str], str]
) -> Call[list[int], list[int]]:
    """`fairq.create_tasks`: one array per column; those that nobody uses stay null."""
    _check_options(options)
    group_keys: list[str] = []
    payloads: list[str] = []
    special: dict[int, Item] = {}
    for position, item in enumerate(items):
        if isinstance(item, Item):
            group_key, payload = item.group_key, item.payload
            special[position] = item
            _check_item(item)
        else:
            group_key, payload = _pair(item, position)
        check_group_key(group_key)
        group_keys.append(group_key)
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

    def column(name: str) -> list[Any] | None:
        if all(getattr(item, name) is None for item in special.values()):
            return None
        return [getattr(special.get(position), name, None) for position in range(len(group_keys))]

    query = queries.enqueue_many.call(
        group_keys=group_keys,
        payloads=payloads,
        queue=options.queue,
        kind=options.kind,
        priority=options.priority,
        run_at=_moment(options.run_at),
        expires_at=_moment(options.expires_at),
        max_attempts=options.max_attempts,
        cost=options.cost,
        timeout=interval(options.timeout),
        idempotency_keys=column("idempotency_key"),
        concurrency_keys=column("concurrency_key"),
        headers=_headers(options.headers),
        priorities=column("priority"),
        costs=column("cost"),
    )
    return Call(query, identity)


def cancel_call(id: int) -> Call[bool, bool]:
    return Call(queries.cancel.call(id=id), identity)


def _pair(item: Any, position: int) -> tuple[str, Any]:
    if isinstance(item, Sequence) and not isinstance(item, str | bytes) and len(item) == 2:
        return item[0], item[1]
    raise ConfigurationError(
        f"items[{position}] is neither a pair of group key and payload nor a fairq.Item: {item!r:.80}"
    )


def _moment(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def interval(length: Seconds | None) -> str | None:
    """A length of time as PostgreSQL reads it, whatever the session's settings."""
    if length is None:
        return None
    if not isinstance(length, timedelta):
        length = timedelta(seconds=length)
    return f"{length // timedelta(microseconds=1)} microseconds"


def _headers(headers: Mapping[str, Any] | None) -> str | None:
    return None if headers is None else encode(dict(headers), "headers")


# --- What can be judged without the database -------------------------------------------------------


def stored_bytes(text: str) -> int:
    """Length as PostgreSQL counts it; too long for any limit where the text cannot be stored at all."""
    if text.isascii():
        return len(text) if "\0" not in text else 10**9
    try:
        return len(text.encode()) if "\0" not in text else 10**9
    except UnicodeEncodeError:
        return 10**9


def check_group_key(group_key: object) -> None:
    if not isinstance(group_key, str) or not 1 <= stored_bytes(group_key) <= 500:
        raise InvalidGroupKey(
            f"the group key is {group_key!r:.60}",
            "Name the tenant the task belongs to: a text of 1 to 500 bytes, without U+0000.",
        )


def _check_key(what: str, key: object, group_key: str) -> None:
    if key is not None and not (isinstance(key, str) and 1 <= stored_bytes(key) <= 500):
        raise InvalidName(
            f"the {what} of a task of group {group_key!r:.60} is {key!r:.60}",
            "Keys are texts of 1 to 500 bytes, without U+0000; None means none.",
        )


def _check_item(item: Item) -> None:
    _check_key("idempotency key", item.idempotency_key, item.group_key)
    _check_key("concurrency key", item.concurrency_key, item.group_key)
    if item.priority is not None:
        _check_priority(item.priority)
    if item.cost is not None:
        _check_cost(item.cost)


def _check_options(options: Options) -> None:
    for what, name in (("queue", options.queue), ("kind", options.kind)):
        if not isinstance(name, str) or not 1 <= stored_bytes(name) <= 200:
            raise InvalidName(f"the {what} is {name!r:.60}", "A text of 1 to 200 bytes, without U+0000.")
    _check_priority(options.priority)
    _check_cost(options.cost)
    attempts = options.max_attempts
    if attempts is not None and not is_int(attempts, 1, 1_000_000):
        raise OutOfRange(f"max_attempts is {attempts!r}", "1 to 1000000; None takes the queue's default.")
    for what, at in (("run_at", options.run_at), ("expires_at", options.expires_at)):
        if at is not None and (not isinstance(at, datetime) or at.utcoffset() is None):
            raise InvalidTime(
                f"{what} is {at!r:.80}, which names no time zone",
                "Pass an aware datetime: datetime.now(timezone.utc) + timedelta(hours=1).",
            )
    timeout = options.timeout
    if timeout is not None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not is_within(seconds, 1e-6, 1e9):
            raise InvalidTime(
                f"the timeout is {timeout!r}", "Seconds or a timedelta, more than 0; None: no limit."
            )


def _check_priority(priority: object) -> None:
    if not is_int(priority, -1_000_000, 1_000_000):
        raise OutOfRange(
            f"the priority is {priority!r}", "Higher runs first: -1000000 to 1000000, 0 by default."
        )


def _check_cost(cost: object) -> None:
    if not is_within(cost, 0.001, 1_000_000):
        raise InvalidCost(
            f"the cost is {cost!r}", "Relative to an ordinary task of cost 1: 0.001 to 1000000."
        )


def is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
