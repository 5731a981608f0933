"""What fires schedules in a worker, alone in a process whose clock is wrong: python -m … DSN SECONDS."""

import sys
import time
from datetime import datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any, Self

from fairq import schedules
from fairq.worker.config import Settings, limits
from fairq.worker.keeper import Keeper

dsn, shift = sys.argv[1], float(sys.argv[2])


class Wrong(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(seconds=shift)


real_time = time.time
time.time = lambda: real_time() + shift
module: Any = schedules
module.datetime = Wrong

settings = Settings(
    concurrency=1, lease=15, heartbeat_ms=1000, maintain_interval_ms=1000, db_retry_initial_ms=100
)


class Engine:
    loop = None

    @property
    def pulse(self) -> float:
        return time.monotonic()


node: Any = SimpleNamespace(
    dsn=dsn,
    settings=settings,
    limits=limits(settings),
    engine=Engine(),
    worker_id=None,
    database=SimpleNamespace(state="closed"),
    ending=SimpleNamespace(give_up_at=lambda: None),
    answered=None,
)
keeper = Keeper(node)
keeper._call = lambda *args: None  # type: ignore[method-assign]  # there is no loop to be told
keeper.start()
print("up", flush=True)
sys.stdin.read()
