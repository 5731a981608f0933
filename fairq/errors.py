"""fairq's exceptions, the table from SQLSTATE to exception, and which errors are worth a retry.

The database driver's own exception is always the `__cause__`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal


class FairqError(Exception):
    """The base of all. `hint` says what to do, if that is known. `code` is the error's name for programs."""

    code: str = "error"
    exit_code: int = 1

    def __init_subclass__(cls, code: str = "", exit_code: int | None = None) -> None:
        if code or "code" not in cls.__dict__:
            cls.code = code or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"Hint: {hint}")  # for tracebacks


# --- What the engine refuses -----------------------------------------------------------------------


class Refused(FairqError):
    """The engine refuses a call. Also raised by checks that need no database. `about` is the wrong option or
    setting, if it is one.
    """

    sqlstate: ClassVar[str] = ""
    about: str | None = None

    def __init_subclass__(cls, sqlstate: str = "", **named: Any) -> None:
        super().__init_subclass__(**named)
        cls.sqlstate = sqlstate or cls.sqlstate


class InvalidGroupKey(Refused, sqlstate="QF001"): ...  # the group key is null, empty or too long


class InvalidPayload(Refused, sqlstate="QF002"): ...  # the payload is null or too large


class NotEncodable(InvalidPayload):
    """A value has no JSON form. `path` is where it is: `payload.items[3].file`."""

    def __init__(self, path: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{path} {reason}", hint)
        self.path = path
        self.reason = reason


class UnknownQueue(Refused, sqlstate="QF003"): ...


class UnknownWorker(Refused, sqlstate="QF004"): ...  # retired, or considered lost


class WrongIsolationLevel(Refused, sqlstate="QF005"): ...  # promotion needs READ COMMITTED


class InvalidName(Refused, sqlstate="QF006"): ...  # a kind, key, queue or worker's name is empty or too long


class OutOfRange(Refused, sqlstate="QF007"): ...  # a priority, limit or count


class InvalidCost(Refused, sqlstate="QF008"): ...


class InvalidTime(Refused, sqlstate="QF009"): ...  # a time or an interval


class IdempotencyConflict(Refused, sqlstate="QF010"): ...  # a task of another kind or payload has the key


class LengthMismatch(Refused, sqlstate="QF011"): ...  # arrays of one call differ in length


class UnknownOutcome(Refused, sqlstate="QF012"): ...


class ShardsInUse(Refused, sqlstate="QF013"): ...  # groups are moving to another number of shards


class UnknownSetting(Refused, sqlstate="QF014"): ...  # an unknown setting, or a kind of another app


class PrefetchRefused(Refused, sqlstate="QF015"): ...  # the cluster has a cap, which excludes claim leases


class QueueDraining(Refused, sqlstate="QF016"):
    """The queue takes no new tasks: somebody is draining it, or forgot to resume it."""


class InvalidSchedule(Refused, sqlstate="QF017"): ...  # its rule is invalid, or it has another owner


class UnknownSchedule(Refused, sqlstate="QF018"): ...


class TasksWouldBeLost(Refused, sqlstate="QF090", code="would_lose_data"): ...  # by a downgrade


# --- Other errors of the database ------------------------------------------------------------------


class DatabaseError(FairqError, code="database", exit_code=3):
    """An error of the database itself. `sqlstate` is its code; None: the database did not answer."""

    def __init__(self, message: str, hint: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(message, hint)
        self.sqlstate = sqlstate


class NotInstalled(DatabaseError): ...  # no schema fairq, or not this version of it


class NotAllowed(DatabaseError): ...  # the role lacks a right


class TransactionAborted(DatabaseError): ...  # an earlier error broke the transaction; roll back first


class Conflict(DatabaseError): ...  # serialization failure or deadlock: run the transaction again


class Unavailable(DatabaseError): ...  # connection lost, server starting, stopping or out of room


# --- How an attempt ends ---------------------------------------------------------------------------


# Ten years, in seconds.
LONGEST_PAUSE = 315_360_000.0
LONGEST_HOLD = 366 * 86_400.0


class TaskError(FairqError):
    """Ends an attempt. `code` is stored in the task's error."""


class UnknownTask(TaskError): ...  # no handler of this kind


class NotDecodable(TaskError, code="payload_invalid"):
    """A payload does not fit the handler's annotation. `path` is the first place where it does not."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason


class ResultNotEncodable(TaskError, code="result_invalid"): ...  # the result cannot be stored


class TaskTimeout(TaskError, TimeoutError, code="timeout"): ...


class FinishLost(TaskError): ...  # ctx.finish_in(conn), but that transaction rolled back


class Cancelled(TaskError): ...  # somebody cancelled it


def is_within(value: object, least: float, most: float) -> bool:
    """Whether it is a number in this range. Booleans and NaN are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


class Fail(TaskError, code="failed"):
    """Raise it in a handler to fail the task now, without further attempts. `code` is your own."""

    def __init__(self, message: str, *, code: str = "failed") -> None:
        super().__init__(message)
        self.code = code


class Retry(TaskError):
    """Raise it in a handler to get another attempt, if any is left, after `delay` or the task's back-off."""

    def __init__(
        self,
        message: str = "asked for a retry",
        *,
        delay: float | timedelta | None = None,
        code: str = "retry",
    ) -> None:
        super().__init__(message)
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay
        if self.delay is not None and not is_within(self.delay, 0, LONGEST_PAUSE):
            raise ConfigurationError(f"Retry(delay={delay!r}) is out of range", "Seconds: 0 to ten years.")
        self.code = code


class RetryAfter(TaskError):
    """Raise it in a handler that has to wait, for example because of an API's `Retry-After`. Uses no attempt.

    `until` is a number of seconds, a timedelta or an aware datetime, at most 366 days away. Until then
    `hold="group"` starts no task of the same group, and `hold="key"` none with the same concurrency key.
    """

    def __init__(
        self,
        until: float | timedelta | datetime,
        *,
        hold: Literal["group", "key"] | None = None,
        message: str = "asked to wait",
        code: str = "retry_after",
    ) -> None:
        super().__init__(message)
        delay: Any = until
        if isinstance(until, datetime) and until.utcoffset() is not None:
            delay = max(0.001, (until - datetime.now(UTC)).total_seconds())
        elif isinstance(until, timedelta):
            delay = until.total_seconds()
        if not is_within(delay, 0.000001, LONGEST_HOLD):
            raise ConfigurationError(
                f"RetryAfter({until!r:.60}) is out of range",
                "Seconds, a timedelta, or a datetime with a time zone: more than 0, at most 366 days.",
            )
        if hold not in ("group", "key", None):
            raise ConfigurationError(
                f"RetryAfter(hold={hold!r:.60}) is unknown", 'Hold the "group" or the "key".'
            )
        self.delay: float = delay
        self.hold = hold
        self.code = code


# --- The rest --------------------------------------------------------------------------------------


class NotHeld(FairqError): ...  # the attempt is no longer this worker's


class NoSuchTask(FairqError):
    def __init__(self, id: int) -> None:
        super().__init__(
            f"there is no task {id}",
            "It was rolled back, was never created, or ended longer ago than its queue's retention.",
        )


class TaskFailed(FairqError):
    """`outcome` is failed, cancelled or expired; `error` is the stored error."""

    def __init__(self, message: str, outcome: str, error: Any) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.error = error


class ResultTimeout(FairqError, TimeoutError): ...  # the task did not end in time


class InTransaction(FairqError): ...  # the wait could never end: the transaction it is in has to end first


class UnsupportedConnection(FairqError, TypeError): ...  # fairq does not know this kind of connection


class ConfigurationError(FairqError, code="configuration", exit_code=2): ...


# --- From SQLSTATE to exception --------------------------------------------------------------------

BY_SQLSTATE: dict[str, type[Refused] | type[DatabaseError]] = {
    **{each.sqlstate: each for each in Refused.__subclasses__()},
    "3F000": NotInstalled,  # no such schema
    "42883": NotInstalled,  # no such function
    "42P01": NotInstalled,  # no such table
    "42703": NotInstalled,  # no such column
    "42501": NotAllowed,
    "25P02": TransactionAborted,
    "40001": Conflict,
    "40P01": Conflict,
    "53300": Unavailable,  # too many connections
    "57P01": Unavailable,  # the administrator ends the session, or stops the server
    "57P02": Unavailable,  # crash of another session
    "57P03": Unavailable,  # starting up, or shutting down
    "57P05": Unavailable,  # idle session timeout
    "25006": Unavailable,  # read only: a standby, or a former primary
}

_HINTS: dict[type[DatabaseError], str] = {
    NotInstalled: "Install or upgrade fairq in this database: fairq migrate",
    NotAllowed: (
        "Grant the role fairq_enqueue to applications, fairq_work to workers, fairq_admin to operators."
    ),
    TransactionAborted: "Roll back, at least to a savepoint, then go on.",
    Conflict: "Run the whole transaction again.",
}


_HINTS_BY_SQLSTATE: dict[str, str] = {
    "25006": "It is a standby, or the role's transactions are read only: fairq doctor says which.",
    "57014": "Somebody cancelled it, or a statement_timeout is too short: fairq doctor says which.",
    "22P05": "The database's encoding has no such character. One with the encoding UTF8 has them all.",
    "53300": "Put a pooler in front, or raise max_connections.",
}


def is_retryable(error: BaseException | str | None) -> bool:
    """Whether a call that failed with this exception (of fairq or a driver) or SQLSTATE may succeed when the
    transaction is run again.
    """
    if isinstance(error, BaseException):
        error = translate(error)
        return isinstance(error, Conflict | Unavailable)
    found = _class_for(error) if error else None
    return found is not None and issubclass(found, Conflict | Unavailable)


def _class_for(sqlstate: str) -> type[Refused] | type[DatabaseError]:
    if sqlstate in BY_SQLSTATE:
        return BY_SQLSTATE[sqlstate]
    if sqlstate.startswith("QF"):
        return Refused  # by an engine newer than this code
    # 08: the connection; 53: out of memory, disk or connections; 58: the machine under it
    return Unavailable if sqlstate[:2] in ("08", "53", "58") else DatabaseError


# --- The boundary ----------------------------------------------------------------------------------

_DRIVERS = ("psycopg", "psycopg2", "sqlalchemy", "asyncpg", "django")
# Errors of drivers without a SQLSTATE, by the name of their class.
_BY_NAME: dict[str, type[DatabaseError]] = {
    "PendingRollbackError": TransactionAborted,
    "PipelineAborted": TransactionAborted,
    "TransactionManagementError": TransactionAborted,
    "OperationalError": Unavailable,
    "InterfaceError": Unavailable,
    "ConnectionDoesNotExistError": Unavailable,
}


_HINTS_BY_NAME: dict[str, str] = {
    "UnboundExecutionError": 'Pass its connection: session.connection(bind_arguments={"bind": engine}).',
    "SynchronousOnlyOperation": "Call it in a function, with asgiref's sync_to_async.",
}


@contextlib.contextmanager
def translating() -> Iterator[None]:
    """Turn errors of a database driver into errors of fairq, with the driver's own as cause."""
    try:
        yield
    except FairqError:
        raise
    except Exception as exc:
        if not _is_of_a_driver(exc):
            raise
        raise translate(exc) from exc


def translate(exc: BaseException) -> FairqError:
    """The exception of fairq for a driver's. One of fairq is returned unchanged."""
    if isinstance(exc, FairqError):
        return exc
    sqlstate, root = sqlstate_of(exc), [exc, *_chain(exc)][-1]
    message = _message(root)
    if sqlstate is None:
        if "another operation is in progress" in message:  # an InterfaceError, as of a closed connection
            return DatabaseError(message, "Await one call after the other, or give each its own connection.")
        names = [each.__name__ for each in type(exc).__mro__]
        otherwise = Unavailable if isinstance(exc, OSError) else DatabaseError
        found = next((_BY_NAME[name] for name in names if name in _BY_NAME), otherwise)
        hint = next((_HINTS_BY_NAME[name] for name in names if name in _HINTS_BY_NAME), _HINTS.get(found))
        return found(message, hint)
    cls = _class_for(sqlstate)
    if issubclass(cls, Refused):
        refused = cls(message, _hint(root))
        refused.about = getattr(getattr(root, "diag", None), "column_name", None)
        return refused
    hint = _hint(root) or _HINTS_BY_SQLSTATE.get(sqlstate) or _HINTS.get(cls)
    return cls(message, hint, sqlstate)


def sqlstate_of(exc: BaseException) -> str | None:
    """The SQLSTATE of an error of psycopg, asyncpg, SQLAlchemy or Django; None if it has none."""
    if isinstance(exc, Refused | DatabaseError):
        return exc.sqlstate
    for each in _chain(exc):
        for name in ("sqlstate", "pgcode"):
            found = getattr(each, name, None)
            if isinstance(found, str) and len(found) == 5:
                return found
    return None


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """The error and those it wraps: SQLAlchemy keeps the driver's in `orig`, Django in `__cause__`."""
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen and _is_of_a_driver(current):
        seen.add(id(current))
        yield current
        inner = getattr(current, "orig", None)
        current = inner if isinstance(inner, BaseException) else current.__cause__


def _is_of_a_driver(exc: BaseException) -> bool:
    return any(each.__module__.split(".", 1)[0] in _DRIVERS for each in type(exc).__mro__)


def _message(exc: BaseException) -> str:
    from fairq.dsn import mask

    diag = getattr(exc, "diag", None)
    primary = getattr(diag, "message_primary", None) or getattr(exc, "message", None) or str(exc)
    return mask(str(primary).strip() or type(exc).__name__)


def _hint(exc: BaseException) -> str | None:
    diag = getattr(exc, "diag", None)
    found = getattr(diag, "message_hint", None) or getattr(exc, "hint", None)
    return found if isinstance(found, str) else None
