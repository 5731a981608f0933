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

__all__ = ["App", "Backoff", "Batch", "Cancellation", "Context", "Item", "Schedule", "Task", "Worker"]
# Tasks and their state.
__all__ += ["cancel", "cancel_many", "enqueue", "enqueue_many", "retry", "retry_many"]
__all__ += ["Explanation", "Progress", "TaskInfo", "TaskResult", "explain", "get", "progress", "result"]
# For operators.
__all__ += ["configure_cluster", "configure_group", "configure_key", "configure_kind"]
__all__ += ["configure_queue", "configure_schedule", "configure_user"]
__all__ += ["ClusterSettings", "GroupSettings", "KeySettings", "KindSettings"]
__all__ += ["QueueSettings", "ScheduleSettings", "UserSettings"]
__all__ += ["GroupState", "KindState", "QueueState", "ScheduleState", "UserState"]
__all__ += ["pause_group", "pause_queue", "pause_schedule", "resume_group", "resume_queue", "resume_schedule"]
__all__ += ["drain_queue", "hold_group", "hold_key", "purge_group", "remove_schedule", "reset_rate"]
__all__ += ["BudgetUsage", "Fairness", "RateUsage", "Share", "budget_usage", "fairness", "rate_usage"]
__all__ += ["preview_schedule", "run_schedule", "shares"]
# What handlers raise.
__all__ += ["Cancelled", "Fail", "Retry", "RetryAfter", "TaskError"]
# What calls raise.
__all__ += ["Conflict", "DatabaseError", "FairqError", "Refused", "Unavailable", "is_retryable"]
__all__ += ["ConfigurationError", "InvalidCost", "InvalidGroupKey", "InvalidName", "InvalidPayload"]
__all__ += ["InvalidSchedule", "InvalidTime", "NotEncodable", "OutOfRange", "UnsupportedConnection"]
__all__ += ["IdempotencyConflict", "NoSuchTask", "QueueDraining", "UnknownQueue", "UnknownSchedule"]
__all__ += ["InTransaction", "NotAllowed", "NotHeld", "NotInstalled", "TransactionAborted"]
__all__ += ["ResultTimeout", "TaskFailed", "TaskTimeout"]

_MODULES = "errors client policies ledger results context backoff batch schedules task app worker"

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        # Imported on first use: `fairq --help` must not wait for a database driver.
        if name in __all__:
            for module in _MODULES.split():
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
