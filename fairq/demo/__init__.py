"""`fairq demo`: one flood among quiet tenants, served by a plain queue and by fairq at the same time.

`scenario` says who enqueues what and when. `engines` has the two queues behind the same calls, `run` feeds
and works them with equal slots, `view` shows it, `plot` draws it, `command` is the command line.
"""

from fairq.demo.command import demo

__all__ = ["demo"]
