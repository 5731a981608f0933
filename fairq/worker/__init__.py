"""The worker: `fairq work module:app`, or in a program of your own `Worker(app, dsn).run()`.

Which module does what: "A worker asks for work" and "The worker runs it" in ARCHITECTURE.md.
"""

from fairq.worker.config import Limits, Settings
from fairq.worker.ending import LifespanFailed, Stuck
from fairq.worker.worker import Worker

__all__ = ["LifespanFailed", "Limits", "Settings", "Stuck", "Worker"]
