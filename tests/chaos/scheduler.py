"""What fires schedules in a worker, alone in a process whose clock is wrong: python -m … DSN SECONDS."""

import sys
import time
from datetime import datetime, timedelta, tzinfo
from typing import Any, Self

from fairq import schedules
from fairq.worker.keeper import Keeper, KeeperPlan

dsn, shift = sys.argv[1], float(sys.argv[2])


class Wrong(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(seconds=shift)


real_time = time.time
time.time = lambda: real_time() + shift
module: Any = schedules
module.datetime = Wrong

keeper = Keeper(
    KeeperPlan(dsn, heartbeat=1, patience=5, lease=60, maintain_every=1, first_maintain=0.5, first_pause=0.1),
    worker_ids=list,
    held=list,
    pulse=time.monotonic,
    cancel=lambda ids: None,
    lost=lambda id_: None,
    answered=lambda after: None,
    circuit=lambda: (False, 0),
    give_up_at=lambda: None,
    last_words=lambda dead: [],
    give_up=lambda dead: None,
)
keeper.start()
print("up", flush=True)
sys.stdin.read()
