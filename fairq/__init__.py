"""A multi-tenant fair queue that lives in PostgreSQL.

fairq.enqueue(conn, "bob", {"file": "a.pdf"})       # in your own transaction, on your own connection

app = fairq.App()

@app.task(kind="parse", max_attempts=5)
def parse(payload: Parse, ctx: fairq.Context) -> None: ...

parse.enqueue(conn, "bob", Parse(file="a.pdf"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairq.app import *
    from fairq.backoff import *
    from fairq.batch import *
    from fairq.client import *
    from fairq.context import *
    from fairq.errors import *
    from fairq.ledger import *
    from fairq.policies import *
    from fairq.results import *
    from fairq.schedules import *
    from fairq.task import *
    from fairq.worker import *

__all__ = [
    "App",
    "Backoff",
    "Batch",
    "BudgetUsage",
    "Cancellation",
    "Cancelled",
    "ClusterSettings",
    "ConfigurationError",
    "Conflict",
    "Context",
    "DatabaseError",
    "Explanation",
    "Fail",
    "Fairness",
    "FairqError",
    "GroupSettings",
    "GroupState",
    "IdempotencyConflict",
    "InTransaction",
    "InvalidCost",
    "InvalidGroupKey",
    "InvalidName",
    "InvalidPayload",
    "InvalidSchedule",
    "InvalidTime",
    "Item",
    "KeySettings",
    "KindSettings",
    "KindState",
    "NoSuchTask",
    "NotAllowed",
    "NotEncodable",
    "NotHeld",
    "NotInstalled",
    "OutOfRange",
    "Progress",
    "QueueDraining",
    "QueueSettings",
    "QueueState",
    "RateUsage",
    "Refused",
    "ResultTimeout",
    "Retry",
    "RetryAfter",
    "Schedule",
    "ScheduleSettings",
    "ScheduleState",
    "Share",
    "Task",
    "TaskError",
    "TaskFailed",
    "TaskInfo",
    "TaskResult",
    "TaskTimeout",
    "TransactionAborted",
    "Unavailable",
    "UnknownQueue",
    "UnknownSchedule",
    "UnsupportedConnection",
    "UserSettings",
    "UserState",
    "Worker",
    "budget_usage",
    "cancel",
    "cancel_many",
    "configure_cluster",
    "configure_group",
    "configure_key",
    "configure_kind",
    "configure_queue",
    "configure_schedule",
    "configure_user",
    "drain_queue",
    "enqueue",
    "enqueue_many",
    "explain",
    "fairness",
    "get",
    "hold_group",
    "hold_key",
    "is_retryable",
    "pause_group",
    "pause_queue",
    "pause_schedule",
    "preview_schedule",
    "progress",
    "purge_group",
    "rate_usage",
    "remove_schedule",
    "reset_rate",
    "result",
    "resume_group",
    "resume_queue",
    "resume_schedule",
    "retry",
    "retry_many",
    "run_schedule",
    "shares",
]

_MODULES = (
    "errors",
    "client",
    "policies",
    "ledger",
    "results",
    "context",
    "backoff",
    "batch",
    "schedules",
    "task",
    "app",
    "worker",
)

if not TYPE_CHECKING:  # or a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        # Imported when first asked for: `fairq --help` must not wait for a database driver.
        if name in __all__:
            for module in _MODULES:
                try:
                    found = import_module(f"fairq.{module}")
                except ImportError as exc:
                    if "no pq wrapper" not in str(exc):
                        raise
                    raise ImportError("psycopg finds no libpq here: pip install 'fairq[binary]'") from exc
                if name in getattr(found, "__all__", vars(found)):
                    value = globals()[name] = getattr(found, name)
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
