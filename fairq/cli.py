"""The command line: one small group whose commands are imported when they are called.

`fairq work` and `fairq enqueue` must start fast, so nothing here imports a database driver, and the list of
commands is a table of texts: `fairq --help` imports none of them. A new command is one line in COMMANDS.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module, metadata, util
from typing import IO, Any, TypeVar

import click
from click.shell_completion import CompletionItem

__all__ = [
    "COMMANDS",
    "Command",
    "Exit",
    "Failure",
    "answer",
    "dsn_option",
    "failure_of",
    "json_option",
    "main",
    "wants_json",
]


class Exit(IntEnum):
    """What a command's exit code means. Documented in docs/reference/exit-codes.md."""

    OK = 0
    NO = 1  # the answer to the question is no: behind, not found, not healthy
    USAGE = 2  # wrong options, no database named
    DATABASE = 3  # the database cannot be reached, or refused a statement
    SCHEMA = 4  # its schema does not fit this code, and migrating does not help
    BUSY = 5  # gave up waiting for a lock
    REFUSED = 6  # would lose data
    BUG = 70  # our own fault


@dataclass(frozen=True)
class Command:
    """A line of the list: where the command is, what it is for, and the extra that brings what it needs."""

    target: str
    help: str
    section: str
    extra: str | None = None


COMMANDS = {
    "demo": Command("fairq.demo:demo", "Watch a fair queue beside a plain one.", "Start", "demo"),
    "work": Command("fairq.commands.work:work", "Run the tasks of an app.", "Start"),
    "migrate": Command("fairq.commands.migrate:migrate", "Install or upgrade fairq in a database.", "Set up"),
    "sql": Command("fairq.commands.migrate:sql", "Print migrations as plain SQL.", "Set up"),
    "doctor": Command(
        "fairq.commands.doctor:doctor", "Check the installation, and say what to do.", "Set up"
    ),
    "completion": Command(
        "fairq.commands.completion:completion",
        "Print a script that makes your shell complete on TAB.",
        "Set up",
    ),
    "enqueue": Command("fairq.commands.tasks:enqueue", "Create tasks, one or a file of them.", "Tasks"),
    "cancel": Command("fairq.commands.tasks:cancel", "Cancel tasks.", "Tasks"),
    "retry": Command("fairq.commands.tasks:retry", "Run ended tasks again, or waiting ones now.", "Tasks"),
    "result": Command("fairq.commands.tasks:result", "Show how a task ended, or wait until it has.", "Tasks"),
    "explain": Command("fairq.commands.explain:explain", "Say why a task waits, or how it ended.", "Tasks"),
    "stats": Command("fairq.commands.stats:stats", "Show how queues, groups and workers stand.", "Queues"),
    "top": Command("fairq.commands.top:top", "Watch queues, groups and workers.", "Queues"),
    "queues": Command(
        "fairq.commands.queues:queues", "List queues; create them, change their settings.", "Queues"
    ),
    "groups": Command(
        "fairq.commands.queues:groups", "List the busiest groups; change a group's settings.", "Queues"
    ),
    "keys": Command(
        "fairq.commands.queues:keys", "List concurrency keys with settings; change them.", "Queues"
    ),
    "cluster": Command(
        "fairq.commands.queues:cluster", "Show the settings of the installation; change them.", "Queues"
    ),
    "pause": Command("fairq.commands.queues:pause", "Stop serving a queue or a group.", "Queues"),
    "resume": Command("fairq.commands.queues:resume", "Serve a paused queue or group again.", "Queues"),
    "drain": Command("fairq.commands.queues:drain", "Let a queue run empty.", "Queues"),
    "maintain": Command("fairq.commands.maintain:maintain", "Run one round of maintenance.", "Queues"),
    "bench": Command("fairq.commands.bench:bench", "Measure fairq on this machine, from a clone.", "Develop"),
    "gen": Command("fairq.codegen.command:gen", "Write typed Python for your SQL.", "Develop", "codegen"),
}

F = TypeVar("F", bound=Callable[..., Any])


class Failure(click.ClickException):
    """An end that is not a success: a message, a hint, and an exit code; as JSON where that was asked for."""

    def __init__(
        self, message: str, *, hint: str | None = None, code: str = "failed", exit_code: int = Exit.NO
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code
        self.exit_code = exit_code  # type: ignore[misc]  # click means it to be set, but calls it a ClassVar
        context = click.get_current_context(silent=True)
        self.as_json = wants_json(context) if context else False

    def show(self, file: IO[Any] | None = None) -> None:
        if self.as_json:
            error = {"code": self.code, "message": self.message, "hint": self.hint}
            click.echo(json.dumps({"error": error}))
            return
        click.echo(f"fairq: {self.message}", err=True)
        if self.hint:
            click.echo(f"  {self.hint}", err=True)


class Commands(click.Group):
    """Looks a command up in COMMANDS and imports it then."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, command in COMMANDS.items() if _there(command)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = COMMANDS.get(cmd_name)
        if command is None or not _there(command):
            return None
        module, attribute = command.target.split(":")
        try:
            found: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as exc:
            if command.extra is None or (exc.name or "").startswith("fairq"):
                raise
            raise Failure(
                f"'fairq {cmd_name}' needs {exc.name}, which is not installed",
                hint=f"pip install 'fairq[{command.extra}]'",
                code="not_installed",
                exit_code=Exit.USAGE,
            ) from exc
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """From the table, too: TAB imports nothing, and works where an extra is missing."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name].help) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            import difflib

            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not close:
                raise
            raise click.UsageError(f"{exc.message} Did you mean '{close[0]}'?", ctx) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        for section in dict.fromkeys(COMMANDS[name].section for name in names):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, COMMANDS[name].help) for name in names if COMMANDS[name].section == section]
                )

    def invoke(self, ctx: click.Context) -> Any:
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except click.UsageError as exc:
            if not as_json:
                raise
            raise _usage_failure(exc) from exc
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # The reader of our output has seen enough; do not complain once more when Python flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(Exit.OK)
        except Exception as exc:
            if os.environ.get("FAIRQ_TRACEBACK"):
                from fairq.dsn import mask

                click.echo(mask(traceback.format_exc()), err=True)
            raise failure_of(exc) from exc


def _usage_failure(exc: click.UsageError) -> Failure:
    """A wrong option, for programs: click has not come as far as --json."""
    path = exc.ctx.command_path if exc.ctx else "fairq"
    failure = Failure(
        exc.format_message(), hint=f"{path} --help tells more.", code="usage", exit_code=Exit.USAGE
    )
    failure.as_json = True
    return failure


def _there(command: Command) -> bool:
    try:
        return util.find_spec(command.target.split(":")[0]) is not None
    except ModuleNotFoundError:
        return False


def failure_of(exc: Exception) -> Failure:
    """How an exception ends the command. Ours say themselves; texts from elsewhere may hold a password."""
    from fairq.dsn import mask
    from fairq.errors import FairqError

    if isinstance(exc, FairqError):
        return Failure(mask(str(exc)), hint=exc.hint, code=exc.code, exit_code=exc.exit_code)
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(exc, psycopg.Error):
        message = exc.diag.message_primary or str(exc).strip() or type(exc).__name__
        code = exc.sqlstate or "unreachable"
        hint = exc.diag.message_hint or exc.diag.message_detail
        if not exc.sqlstate:
            hint = "Is the database there, and does --dsn name it and a user that may connect?"
        return Failure(mask(message), hint=hint, code=code, exit_code=Exit.DATABASE)
    hint = "This is a mistake in fairq. Set FAIRQ_TRACEBACK=1 to see where, and please report it."
    return Failure(mask(f"{type(exc).__name__}: {exc}"), hint=hint, code="bug", exit_code=Exit.BUG)


def dsn_option(command: F) -> F:
    """--dsn; the command gets the text as given, and asks fairq.dsn.resolve() for the one that counts."""
    return click.option(
        "--dsn",
        metavar="DSN",
        help="The database, as a URL or as key=value pairs. Default: FAIRQ_DSN, then DATABASE_URL.",
    )(command)


def json_option(command: F) -> F:
    """--json; read it with wants_json(), print with answer()."""

    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta["fairq.json"] = value

    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Answer in JSON.",
    )(command)


def wants_json(ctx: click.Context | None = None) -> bool:
    ctx = ctx or click.get_current_context()
    return bool(ctx.meta.get("fairq.json", False))


def answer(document: dict[str, Any], text: str) -> None:
    """The result of a command, for whoever asked: people or programs."""
    click.echo(json.dumps(document, default=str) if wants_json() else text)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'fairq COMMAND --help' tells more about each.",
)
@click.version_option(metadata.version("fairq"), prog_name="fairq", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """A multi-tenant fair queue that lives in PostgreSQL.

    \b
    fairq demo                      see it at work; needs no database
    export FAIRQ_DSN=postgresql://user@host/name
    fairq migrate                   install fairq in your database
    fairq enqueue bob '{"n": 1}'    a task of the tenant bob
    fairq explain 1                 why it waits
    fairq work myapp.tasks          run tasks with your handlers
    fairq top                       watch
    fairq doctor                    is everything well?
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
