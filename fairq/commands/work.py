"""`fairq work`."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, get_args

import click
from click.core import ParameterSource

from fairq.cli import (
    Exit,
    Failure,
    Seconds,
    command,
    drop_output,
    failure_of,
    flush_output,
    named_dsn,
    option,
    together,
    wants_json,
)
from fairq.dsn import VARIABLES, clean, mask
from fairq.errors import ConfigurationError, FairqError, Refused, UnknownQueue
from fairq.worker import log
from fairq.worker.config import TOLD, Nodes, Settings, queues_of
from fairq.worker.handlers import RUNNING

LISTEN_DSN = "FAIRQ_LISTEN_DSN"


def settings_of_a_worker() -> Callable[..., Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    options = []
    for name, (shown, text) in TOLD.items():
        default: Any = defaults[name]
        kind = int if name.endswith("_ms") else float if default is None else type(default)
        is_told = default not in (None, "")
        flag = f"--{name.replace('_', '-')} {shown}"
        options.append(option(flag, text, type=kind, default=default, show_default=is_told))
    return together(*options)


@command(
    codes={
        0: "ended as asked",
        1: "handlers hang, the app's lifespan failed, or the database is older than this fairq",
        3: "the database refuses the worker, or failed --db-retry-max-attempts times",
        4: "the database is newer than this fairq",
    }
)
@click.argument("app", metavar="MODULE[:APP]", envvar="FAIRQ_APP")
@option(
    "--queue -q queues NAME[=WEIGHT]",
    "Serve this queue. With several, the first is emptied before the next is asked; with a weight each, each"
    " gets its share. Default: the queues of the app's tasks, with equal shares.",
    multiple=True,
)
@option(
    "--processes -p N",
    "Worker processes. With more than one, a supervisor restarts those that crash.",
    type=int,
    default=1,
)
@option(
    "--nodes",
    "Which nodes of Citus to serve. all: by turns; near: first the DSN's, others with the slots it leaves"
    " free; own: only the DSN's.",
    type=click.Choice(get_args(Nodes)),
    default="all",
)
@option("--once", "Look for tasks once, run those found, and end.")
@option("--drain", "End when no task is left that may run now.")
@settings_of_a_worker()
@option(
    "--poll-interval SECONDS",
    "Longest pause between two looks for tasks, 1 to 300. Default: 5, or 1 without LISTEN.",
    type=Seconds(0, 100_000),
)
@option(
    "--listen-dsn DSN",
    "Where to LISTEN if --dsn leads through a transaction pooler. Default: FAIRQ_LISTEN_DSN.",
    envvar=LISTEN_DSN,
)
@option("--no-listen", "Only poll.")
@option(
    "--maintain-interval SECONDS",
    "How often to run the upkeep. 0: never, and fire no schedules.",
    type=Seconds(0, 100_000),
    default=5.0,
)
@option(
    "--log-level",
    "debug adds starts, successes, and the tracebacks of attempts that will be retried.",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
)
def work(
    app: str,
    queues: tuple[str, ...],
    processes: int,
    nodes: Nodes,
    once: bool,
    drain: bool,
    poll_interval: float | None,
    maintain_interval: float,
    no_listen: bool,
    log_level: str,
    **options: Any,
) -> None:
    """It runs until a signal ends it. MODULE:APP is the fairq.App, for example myapp.tasks:app; if the module
    has only one app, MODULE is enough. Default: FAIRQ_APP.

    fairq work myapp.tasks                           all queues, by turns
    fairq work myapp.tasks -q mail -q reports -c 20  mail first; 20 tasks at once
    fairq work myapp.tasks -q mail=3 -q reports=1    three mails for each report
    fairq work myapp.tasks -p 4                      four processes
    fairq work myapp.tasks --drain                   until nothing is left

    After TERM or INT it takes no new tasks, and handlers may end within the grace time. The rest is given
    back without using an attempt. After a second signal, or QUIT, it gives back everything at once.
    """
    from fairq.worker.loading import load_app
    from fairq.worker.supervisor import LIFELINE, Supervisor, watch_supervisor

    source = click.get_current_context().get_parameter_source
    _log(log_level, source("log_level") is not ParameterSource.DEFAULT)
    served, problems = queues_of(queues)
    if once and drain:
        problems.append("--once and --drain exclude each other")
    if not 1 <= processes <= 1000:
        problems.append(f"--processes is {processes}; it must be 1 to 1000")
    if no_listen and source("listen_dsn") is ParameterSource.ENVIRONMENT:
        # The variable is for workers that listen. Only both options on the command line are a mistake.
        options["listen_dsn"] = None
    settings = Settings(
        queues=served,
        nodes=nodes,
        mode="once" if once else "drain" if drain else "forever",
        listen=not no_listen,
        notify_poll_interval_ms=None if poll_interval is None else round(poll_interval * 1000),
        maintain_interval_ms=round(maintain_interval * 1000),
        **options,
    )
    from fairq.worker.signals import handled
    from fairq.worker.worker import Worker

    loaded = load_app(app)
    try:
        worker = Worker(loaded, named_dsn(), settings=settings, announce=_announce, also_wrong=problems)
    except ConfigurationError as exc:
        exc.hint = "fairq work --help explains every option."
        raise _failure(exc) from exc
    code: int = Exit.OK
    try:
        with handled(lambda *_: worker.stop(), for_good=True):
            if processes > 1 and LIFELINE not in os.environ:
                # The same command that started this one: `fairq`, `python -m fairq`, `manage.py fairq`.
                args, secrets = hide_dsns(sys.orig_argv[1:])
                argv = [sys.executable, *args]
                # With --once and --drain a missing database ends the process for good.
                final = (Exit.OK, Exit.DATABASE) if once or drain else (Exit.OK,)
                sys.exit(Supervisor(argv, processes, settings.grace, secrets, final).run())
            watch_supervisor(worker.stop)
            worker.run(handle_signals=True)
    except Exception as exc:
        failure = _failure(exc)
        if not worker.left_behind:
            if not isinstance(exc, FairqError):
                raise
            raise failure from exc
        failure.show()
        code = failure.exit_code
    if worker.left_behind:
        # Python would wait for some kinds of threads. Hanging handlers must not keep the process.
        logging.shutdown()
        flush_output()
        os._exit(code)


def _failure(exc: Exception) -> Failure:
    """The failure for an exception, worded for the command line."""
    from fairq.commands.words import in_options, refusal

    context = click.get_current_context()
    failure = refusal(exc, context) if isinstance(exc, Refused) else failure_of(exc)
    return Failure(
        in_options(failure.message, context),
        hint=in_options(failure.hint or "", context),
        code=failure.code,
        exit_code=Exit.USAGE if isinstance(exc, UnknownQueue) else failure.exit_code,  # no restart helps
    )


def hide_dsns(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Arguments without connection strings, and those as environment variables: anybody may see arguments."""
    names = {"--dsn": VARIABLES[0], "--listen-dsn": LISTEN_DSN}
    kept: list[str] = []
    secrets: dict[str, str] = {}
    rest = iter(args)
    for arg in rest:
        option, sign, value = arg.partition("=")
        if option in names:
            secrets[names[option]] = value if sign else next(rest, "")
        else:
            kept.append(arg)
    return kept, secrets


def _announce(line: str) -> None:
    """A worker whose output has no room, or no reader, works all the same."""
    try:
        click.echo(json.dumps({"started": line}) if wants_json() else line)
    except OSError as exc:
        drop_output()
        log.warning("output_lost", "cannot write to stdout: %s", exc.strerror)


class Short(logging.Formatter):
    """Cuts tracebacks: an exception may quote megabytes, and the loop writes them, for all tenants."""

    def formatException(self, ei: Any) -> str:
        text = mask(super().formatException(ei))
        half = LONGEST_TRACEBACK // 2
        return text if len(text) <= LONGEST_TRACEBACK else f"{text[:half]} … {text[-half:]}"


class Lines(Short):
    """Removes passwords and what a terminal would obey, also from tracebacks and libraries' messages."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(clean, mask(super().format(record)).split("\n")))


class JsonLines(Short):
    """The record with all its facts as JSON. Lines written by a handler also have its task's facts."""

    def format(self, record: logging.LogRecord) -> str:
        entry = RUNNING.get(None)
        at = datetime.fromtimestamp(record.created, UTC)
        more = {key: value for key, value in record.__dict__.items() if key not in _OF_ALL}
        document = {
            "at": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(entry.facts() if entry is not None else {}),
            **more,
            "traceback": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({key: _plain(value) for key, value in document.items() if value is not None})


# In characters.
LONGEST_TRACEBACK: Final = 50_000
_OF_ALL = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"})


def _plain(value: Any) -> Any:
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return [*map(_plain, value)] if isinstance(value, list) else mask(str(value))


def _log(level: str, asked_for: bool) -> None:
    """Set up logging, but keep what the program (or Django's LOGGING) has set up."""
    logger = logging.getLogger("fairq")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            JsonLines() if wants_json() else Lines("%(asctime)s %(levelname)-7s %(message)s")
        )
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if asked_for or logger.level == logging.NOTSET:
        logger.setLevel(level.upper())
