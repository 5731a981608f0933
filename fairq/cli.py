"""The command line: one small group whose commands are imported when they are called.

`fairq work` and `fairq enqueue` must start fast, so this module imports no database driver, and `fairq
--help` imports no command. COMMANDS lists every command; the rest of its declaration is at its function.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Exit(IntEnum):
    """What a command's exit code means. Documented in docs/reference/exit-codes.md."""

    OK = 0
    NO = 1  # the answer is no: behind, not found, not healthy
    USAGE = 2  # wrong options, no database named
    DATABASE = 3  # the database cannot be reached, or refused a statement
    SCHEMA = 4  # its schema does not fit this code, and migrating does not help
    BUSY = 5  # gave up waiting for a lock
    REFUSED = 6  # would lose data
    BUG = 70  # a bug in fairq


@dataclass(frozen=True)
class Command:
    """A command's module, its help, and the extra that installs what it needs."""

    module: str
    help: str
    section: str
    extra: str = "cli"


COMMANDS = {
    "demo": Command("fairq.demo", "Watch a fair queue beside a plain one.", "Start", "demo"),
    "work": Command("fairq.commands.work", "Run the tasks of an app.", "Start"),
    "migrate": Command("fairq.commands.migrate", "Install or upgrade fairq in a database.", "Set up"),
    "sql": Command("fairq.commands.migrate", "Print migrations as plain SQL.", "Set up"),
    "doctor": Command("fairq.commands.doctor", "Check the installation, and say what to do.", "Set up"),
    "enqueue": Command("fairq.commands.tasks", "Create one task, or many from a file.", "Tasks"),
    "cancel": Command("fairq.commands.tasks", "Cancel tasks.", "Tasks"),
    "retry": Command("fairq.commands.tasks", "Run ended tasks again, or scheduled ones now.", "Tasks"),
    "result": Command("fairq.commands.tasks", "Show how a task ended, or wait for its end.", "Tasks"),
    "explain": Command("fairq.commands.explain", "Say why a task waits, or how it ended.", "Tasks"),
    "stats": Command("fairq.commands.stats", "Show the state of queues, groups and workers.", "Queues"),
    "top": Command("fairq.commands.top", "Watch queues, groups and workers.", "Queues"),
    "shares": Command("fairq.commands.shares", "Show who gets what.", "Queues"),
    "metrics": Command("fairq.commands.metrics", "Print metrics for Prometheus.", "Queues"),
    "web": Command("fairq.commands.web", "Serve a web page of who gets what.", "Queues", "web"),
    "queues": Command("fairq.commands.queues", "List and create queues; change their settings.", "Queues"),
    "groups": Command("fairq.commands.queues", "List the busiest groups; change their settings.", "Queues"),
    "keys": Command("fairq.commands.queues", "List concurrency keys with settings; change them.", "Queues"),
    "cluster": Command("fairq.commands.queues", "Show or change the cluster's settings.", "Queues"),
    "schedules": Command("fairq.commands.schedules", "List and change schedules.", "Queues"),
    "pause": Command(
        "fairq.commands.queues", "Stop serving a queue, a group, or a user of a group.", "Queues"
    ),
    "resume": Command("fairq.commands.queues", "Serve a paused queue, group or user again.", "Queues"),
    "drain": Command("fairq.commands.queues", "Let a queue run empty.", "Queues"),
    "rebuild": Command("fairq.commands.queues", "Rebuild the order of a queue.", "Queues"),
    "maintain": Command("fairq.commands.maintain", "Run one round of the upkeep.", "Queues"),
    "bench": Command("fairq.commands.bench", "Measure fairq on this machine, from a clone.", "Develop"),
    "gen": Command("fairq.codegen.command", "Write typed Python for your SQL.", "Develop", "codegen"),
}


class Failure(click.ClickException):
    """Ends a command with a message, a hint and an exit code; as JSON if --json is given."""

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
            try:
                click.echo(json.dumps({"error": error}))
                return
            except OSError:  # there is no room for it
                drop_output()
        from fairq.dsn import clean

        # Wrapped for a terminal, not for a log.
        width = shutil.get_terminal_size().columns - 1 if sys.stderr.isatty() else sys.maxsize
        wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        wrap.subsequent_indent = "  "
        for text, indent in ((f"fairq: {self.message}", ""), (self.hint or "", "  ")):
            wrap.initial_indent = indent
            for line in text.splitlines():
                click.echo(wrap.fill(clean(line.expandtabs(2).rstrip())), err=True)


def drop_output() -> None:
    """Nobody can read what we print; keep Python from failing again when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_output() -> None:
    """Write what is left of the output, if there is room for it."""
    try:
        if sys.stdout is not None:  # None: it was closed before we began
            sys.stdout.flush()
    except OSError:
        drop_output()


class Commands(click.Group):
    """Imports a command when it is called; help and completion import none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (known := COMMANDS.get(cmd_name)) is None:
            return None
        try:
            found: click.Command = getattr(import_module(known.module), cmd_name)
        except ImportError as exc:
            if failure := missing(exc, f"'fairq {cmd_name}'", known.extra):
                raise failure from exc
            raise
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [name for name in COMMANDS if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name].help) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(each.section for each in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, each.help) for name, each in COMMANDS.items() if each.section == section]
                )

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> click.Context:
        """Reads the options before the command, of which --help and --version already print."""
        with _ended_well():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _ended_well(as_json="--json" in ctx.args):
            return super().invoke(ctx)


@contextlib.contextmanager
def _ended_well(as_json: bool = False) -> Iterator[None]:
    """Turns what goes wrong inside into a Failure."""
    try:
        yield
    except click.UsageError as exc:
        path = exc.ctx.command_path if exc.ctx else "fairq"
        message = exc.format_message().replace("a valid integer", "a whole number")
        message, hint = message.replace("a valid float", "a number"), f"{path} --help tells more."
        failure = Failure(message, hint=hint, code="usage", exit_code=Exit.USAGE)
        failure.as_json = as_json  # click may have failed before it read --json
        raise failure from exc
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except BrokenPipeError:
        drop_output()
        raise click.exceptions.Exit(Exit.OK) from None
    except Exception as exc:
        if os.environ.get("FAIRQ_TRACEBACK"):
            import traceback

            from fairq.dsn import mask

            click.echo(mask(traceback.format_exc()), err=True)
        flush_output()  # Python would fail again when it ends
        raise failure_of(exc) from exc


def missing(exc: ImportError, what: str, extra: str) -> Failure | None:
    """Say what to install, unless the missing module is our own."""
    if "no pq wrapper" in str(exc):
        return not_installed("psycopg's libpq", what, "binary")
    if isinstance(exc, ModuleNotFoundError) and not (exc.name or "fairq").startswith("fairq"):
        return not_installed(str(exc.name), what, extra)
    return None


def not_installed(name: str, what: str, extra: str) -> Failure:
    text, hint = f"{what} needs {name}, which is not installed", f"pip install 'fairq[{extra}]'"
    return Failure(text, hint=hint, code="not_installed", exit_code=Exit.USAGE)


def failure_of(exc: Exception) -> Failure:
    """How an exception ends the command. Messages from elsewhere may hold a password."""
    from fairq.dsn import mask
    from fairq.errors import FairqError

    if isinstance(exc, FairqError):
        return Failure(mask(str(exc)), hint=exc.hint, code=exc.code, exit_code=exc.exit_code)
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(exc, psycopg.Error):
        message = exc.diag.message_primary or str(exc).strip() or type(exc).__name__
        code = exc.sqlstate or "unreachable"
        hint = mask("\n".join(filter(None, (exc.diag.message_detail, exc.diag.message_hint)))) or None
        if not exc.sqlstate:
            hint = "Is the database running, and does --dsn name it and a user that may connect?"
        return Failure(mask(message), hint=hint, code=code, exit_code=Exit.DATABASE)
    if isinstance(exc, UnicodeError):
        return Failure(f"the input is not UTF-8: {exc}", code="usage", exit_code=Exit.USAGE)
    if isinstance(exc, OSError):
        return Failure(mask(str(exc) or type(exc).__name__), code="system")
    hint = "This is a bug in fairq. Set FAIRQ_TRACEBACK=1 to see where, and please report it."
    return Failure(mask(f"{type(exc).__name__}: {exc}"), hint=hint, code="bug", exit_code=Exit.BUG)


# --- Declaring commands and options ----------------------------------------------------------------


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep the value for every subcommand."""
    if value:
        ctx.meta[f"fairq.{param.name}"] = value


DSN = click.Option(
    ["--dsn"],
    metavar="DSN",
    expose_value=False,
    is_eager=True,
    callback=_remember,
    help="The database, as a URL or as key=value pairs. Default: FAIRQ_DSN, then DATABASE_URL.",
)
JSON = click.Option(
    ["--json"], is_flag=True, expose_value=False, is_eager=True, callback=_remember, help="Answer in JSON."
)


def named_dsn() -> str | None:
    """The value of --dsn; fairq.dsn.resolve() adds the environment."""
    return click.get_current_context().meta.get("fairq.dsn")


def wants_json(ctx: click.Context | None = None) -> bool:
    return bool((ctx or click.get_current_context()).meta.get("fairq.json"))


def command(
    name: str | None = None,
    *,
    codes: Mapping[int, str] | None = None,
    rights: str | None = None,
    dsn: bool = True,
    json: bool = True,
    parent: click.Group | None = None,
    **attributes: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Declare a command with --dsn and --json. Its help begins with its line in COMMANDS and ends with its
    exit codes and the role it needs. A paragraph that begins with `fairq ` holds examples and is not wrapped.
    """
    ends = {0: "done", 2: "wrong usage", **({3: "database"} if dsn else {}), **(codes or {})}
    epilog = f"Exit codes: {' · '.join(f'{code} {ends[code]}' for code in sorted(ends))}"
    options = [*([DSN] if dsn else []), *([JSON] if json else [])]
    epilog += f"\n\nRights: {rights}" if rights else ""

    def made(function: Callable[..., Any]) -> click.Command:
        listed = COMMANDS.get(name or function.__name__) if parent is None else None
        about = inspect.getdoc(function) or ""
        help = f"{listed.help}\n\n{about}" if listed else about
        help = help.replace("\n\nfairq ", "\n\n\b\nfairq ")
        kind: type[click.Command] = attributes.pop("cls", click.Command)
        found = click.command(name, kind, help=help, epilog=epilog, **attributes)(function)
        found.params += options
        found.rights = rights or ""  # type: ignore[attr-defined]
        if parent is not None:
            parent.add_command(found)
        return found

    return made


def group(**attributes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a command with subcommands, which also runs without one."""
    return command(cls=click.Group, invoke_without_command=True, **attributes)


def option(names: str, help: str, **attributes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare an option by its names and, unless it is a flag, its value: `--since TIME`."""
    *words, shown = names.split()
    if shown.startswith("-") or shown.islower():
        words.append(shown)
        attributes.setdefault("is_flag", "type" not in attributes)
    else:
        attributes["metavar"] = shown
    attributes.setdefault("show_default", "default" in attributes)
    return click.option(*words, help=help, **attributes)


def together(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Combine several decorators into one."""

    def decorated(command: Callable[..., Any]) -> Any:
        for each in reversed(options):
            command = each(command)
        return command

    return decorated


class Seconds(click.FloatRange):
    """nan is below no least number, and above no most."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is not a valid float.", param, ctx) if math.isnan(found) else found


def amount(
    names: str, default: float, help: str, *, least: float = 1, most: float = 100_000
) -> Callable[[Callable[..., Any]], Any]:
    """Declare an option that takes a number; a float default means seconds."""
    kind: Any
    kind, shown = (click.IntRange, "N") if isinstance(default, int) else (Seconds, "SECONDS")
    return option(f"{names} {shown}", help, type=kind(least, most), default=default)


@click.group(
    cls=Commands,
    commands=dict.fromkeys(COMMANDS),  # for its suggestions
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'fairq COMMAND --help' tells more about a command.",
)
@click.version_option(package_name="fairq", prog_name="fairq", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """A multi-tenant fair queue that lives in PostgreSQL.

    \b
    fairq demo                      see it work; needs no database
    export FAIRQ_DSN=postgresql://user@host/name
    fairq migrate                   install fairq in your database
    fairq enqueue bob '{"n": 1}'    create a task of the tenant bob
    fairq explain 1                 see why it waits
    fairq work myapp.tasks          run tasks with your handlers
    fairq top                       watch the queues
    fairq doctor                    check the installation
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
