"""The worker: `fairq work module:app`, or in a program of your own `Worker(app, dsn).run()`."""

from fairq.worker.config import Limits, Settings
from fairq.worker.loop import Stuck, Worker

__all__ = ["Limits", "Settings", "Stuck", "Worker"]
