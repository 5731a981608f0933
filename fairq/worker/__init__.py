"""The worker: `fairq work module:app`, or in a program of your own `Worker(app, dsn).run()`.

worker      what a program sees: checked configuration, the loop, signals, stop
engine      the run, and the app's lifespan around it
node        one database: turn after turn, from registering to signing off, and what it holds by the book
cluster     several of them, on Citus
turns       what the next turn sends, how, and what its answer or its failure means
ending      who asked it to end, how urgently, until when
held        the tasks in hand, from the pop to the end
outbox      what has ended and is not written
handlers    running them, on the loop and in threads
waking      notices, and when to look for work
database    the connection for the turns, and pauses when it fails
keeper      a thread of its own: signs of life, cancellations, maintenance, a watch on the loop
listen      LISTEN, which shortens the wait
log         what it says, and what programs read of that
signals     TERM, INT and QUIT
supervisor  several processes

Decisions without I/O: config (what may be asked for), plan (how many, when), shares (several queues by
weight), rota (which of several databases), breaker (the circuit breaker).
"""

from fairq.worker.config import Limits, Settings
from fairq.worker.ending import LifespanFailed, Stuck
from fairq.worker.worker import Worker

__all__ = ["LifespanFailed", "Limits", "Settings", "Stuck", "Worker"]
