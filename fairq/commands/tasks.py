"""`fairq enqueue`, `cancel`, `retry`, `result`."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fairq import client, driver, results
from fairq.cli import Exit, Failure, amount, command, option, together, wants_json
from fairq.commands.common import (
    Connection,
    asks,
    clean,
    console,
    count,
    duration,
    ident,
    parse_duration,
    parse_when,
    plain,
    session,
    show,
    task_ids,
    when,
)
from fairq.commands.settings import task_options
from fairq.errors import FairqError, Refused, ResultTimeout, translating
from fairq.options import OF_ITEMS, EnqueueOptions, Item, options_of
from fairq.outcome import told

BATCH = 5000

# --- enqueue ---------------------------------------------------------------------------------------


@command(codes={1: "refused, nothing created"}, rights="fairq_enqueue")
@click.argument("group", required=False, metavar="[GROUP]")
@click.argument("payload", required=False, metavar="[PAYLOAD]")
@task_options()
@option(
    "--from source FILE",
    "Create one task per line of this file; - is stdin. Options and GROUP are defaults for the lines.",
    type=click.Path(allow_dash=True, dir_okay=False),
)
@option(
    "--commit-each",
    "With --from: commit every batch. Default: the whole file is one transaction.",
)
@amount("--batch", BATCH, "With --from: lines per call.")
@option(
    "--skip N",
    "With --from: skip the first N lines, to go on where an earlier run stopped.",
    type=click.IntRange(min=0),
    default=0,
    show_default=False,
)
def enqueue(
    group: str | None,
    payload: str | None,
    source: str | None,
    commit_each: bool,
    batch: int,
    skip: int,
    **options: Any,
) -> None:
    """GROUP is the tenant whose turn the task takes: any text, without registration. PAYLOAD is JSON, {} by
    default, - for stdin. The command prints the id.

    A file has one JSON object per line: "group_key", "payload", and optionally the options below, such as
    "queue", "run_at" or "idempotency_key". It is one transaction: if a line is wrong, no task is created.

    fairq enqueue bob '{"file": "a.pdf"}'
    fairq enqueue bob '{"file": "a.pdf"}' --queue docs --kind parse --run-at +10m
    fairq enqueue --from tasks.jsonl
    jq -c '{group_key: .owner, payload: .}' files.json | fairq enqueue --from -
    fairq enqueue --from huge.jsonl --commit-each    then, if it stopped: --skip N
    """
    options["headers"] = json_object(options["headers"])
    if source is None:
        if commit_each or skip:
            raise click.UsageError("--commit-each and --skip need --from.")
        if group is None:
            raise click.UsageError("Name a GROUP, or a file with --from.")
        text = sys.stdin.read() if payload == "-" else payload
        value = {} if text is None else json_value(text, "The payload")
        with session() as conn, conn.transaction():
            task_id = client.enqueue(conn, group, value, **options)
        answer = {"id": task_id, "group_key": group, "queue": options["queue"], "kind": options["kind"]}
        show(answer, str(task_id))
        return
    keys = {name: options.pop(name) for name in ("idempotency_key", "concurrency_key", "unique")}
    if payload is not None or any(keys.values()):
        raise click.UsageError("With --from, payloads and keys belong in the lines of the file.")
    with _lines(source) as lines:
        rest = itertools.dropwhile(lambda line: line[0] <= skip, lines)
        done = _enqueue_many(rest, options, group, batch, commit_each)
    text = f"{count(done['created'], 'task')} of {count(done['groups'], 'group')}"
    text += f": {done['first_id']}{f' to {last}' if (last := done['last_id']) != done['first_id'] else ''}."
    show(done, text if done["created"] else "The file has no lines.")


def json_value(text: str, what: str) -> Any:
    try:
        return read_json(text)
    except ValueError as exc:
        text = f"{what} is not JSON: {exc}. Quote it for the shell: '{{\"a\": 1}}'."
        raise click.UsageError(text) from None


def read_json(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and Infinity, which PostgreSQL refuses."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as exc:
        raise ValueError(str(exc)) from None


def json_object(text: str | None) -> dict[str, Any] | None:
    """The value of --headers."""
    value = None if text is None else json_value(text, "--headers")
    if value is not None and not isinstance(value, dict):
        raise click.UsageError("--headers is not a JSON object.")
    return value


# --- enqueue --from --------------------------------------------------------------------------------


class Task(NamedTuple):
    line: int
    options: dict[str, Any]
    item: Item


class BadLine(Failure):
    def __init__(self, number: int, message: str, hint: str | None = None) -> None:
        super().__init__(f"line {number}: {message}", hint=hint, code="invalid_line", exit_code=Exit.NO)


FIELDS = frozenset({"group_key", "payload", *options_of(EnqueueOptions)} - {"unique"})


def read_line(number: int, text: bytes, defaults: dict[str, Any], group: str | None, now: datetime) -> Task:
    """The task of a line. Raises BadLine."""
    one_per_line = 'Write one object per line: {"group_key": "bob"}'
    try:
        value = read_json(text.decode())
    except ValueError as exc:
        raise BadLine(number, f"not JSON: {exc}", one_per_line) from None
    if not isinstance(value, dict):
        raise BadLine(number, "not a JSON object", one_per_line)
    if unknown := sorted(value.keys() - FIELDS):
        hint = f"Known fields: {', '.join(sorted(FIELDS))}. The task's own data belongs in payload."
        raise BadLine(number, f"unknown field {clean(unknown[0])!r}", hint)
    group_key, payload = value.pop("group_key", group), value.pop("payload", {})
    if group_key is None:
        hint = "Add it to the line, or name a GROUP for all lines without one."
        raise BadLine(number, "no group_key", hint)
    given = {name: _option(number, name, value[name], now) for name in value if value[name] is not None}
    own = {name: given.pop(name) for name in OF_ITEMS if name in given}
    return Task(number, {**defaults, **given}, Item(group_key, payload, **own))


def _option(number: int, name: str, value: Any, now: datetime) -> Any:
    """A field's JSON value, converted for the option of that name."""
    kind = options_of(EnqueueOptions)[name].type
    if kind is datetime:
        at = parse_when(value, now) if isinstance(value, str) else None
        if at is None:
            hint = "Write a time with its zone, 2030-01-31T08:00:00+00:00, or +10m."
            raise BadLine(number, f"{name} is {value!r:.60}", hint)
        return at
    if kind is timedelta:
        length = parse_duration(value) if isinstance(value, str) else value
        if not isinstance(length, timedelta | int | float):
            raise BadLine(number, f"{name} is {value!r:.60}", "Write seconds, or 30s, 10m, 2h.")
        return length
    if kind is Mapping and not isinstance(value, dict):
        raise BadLine(number, f"{name} is not an object")
    return value


@contextlib.contextmanager
def _lines(source: str) -> Iterator[Iterator[tuple[int, bytes]]]:
    """The non-empty lines of a file with their numbers, with a progress bar on a terminal."""
    try:
        file = click.open_file(source, "rb")
        size = 0 if source == "-" else os.fstat(file.fileno()).st_size
    except OSError as exc:
        raise click.UsageError(f"{source} cannot be read: {exc.strerror}.") from None
    err = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    hidden = wants_json() or not err.is_terminal
    with file, Progress(*columns, console=err, transient=True, disable=hidden) as progress:
        bar = progress.add_task("enqueueing", total=size or None)

        def numbered() -> Iterator[tuple[int, bytes]]:
            end = 0
            for number, text in enumerate(file, 1):
                end += len(text)
                if number % 1000 == 0:
                    progress.update(bar, completed=end)
                if line := text.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                    yield number, line

        yield numbered()


def _enqueue_many(
    lines: Iterator[tuple[int, bytes]],
    options: dict[str, Any],
    group: str | None,
    batch: int,
    commit_each: bool,
) -> dict[str, Any]:
    now = datetime.now(UTC)
    created, first, last, done = 0, None, None, 0
    groups: set[str] = set()
    chunk: list[tuple[int, bytes]] = []
    with session() as conn, contextlib.nullcontext() if commit_each else conn.transaction():
        try:
            while chunk := list(itertools.islice(lines, batch)):
                found = [read_line(*line, options, group, now) for line in chunk]
                with conn.transaction() if commit_each else contextlib.nullcontext():
                    ids = _create(conn, found)
                created += len(ids)
                groups.update(str(task.item.group_key) for task in found)
                first, last, done = first or ids[0], ids[-1], chunk[-1][0]
        except (Failure, FairqError, KeyboardInterrupt) as exc:
            raise _stopped(exc, chunk, done if commit_each else None) from exc
    return {"created": created, "groups": len(groups), "first_id": first, "last_id": last}


def _create(conn: Connection, found: list[Task]) -> list[int]:
    """Create the tasks of some lines, in their order, in one round trip.

    create_tasks takes one queue, kind and time for all tasks, so each run of lines with equal options is a
    call.
    """
    try:
        calls = [
            client.create_many_call([task.item for task in run], options)
            for options, run in itertools.groupby(found, key=lambda task: task.options)
        ]
        with translating():
            return [id for ids in driver.run_pipeline(conn, *calls) for id in ids]
    except Refused as exc:
        for task in found:  # a refusal that needs no database happens again, and tells the line
            try:
                client.create_many_call([task.item], task.options)
            except FairqError as own:
                raise BadLine(task.line, str(own).replace("items[0].", ""), own.hint) from None
        if len(found) == 1:
            raise BadLine(found[0].line, str(exc), exc.hint) from exc
        raise


def _stopped(
    exc: Failure | FairqError | KeyboardInterrupt, chunk: list[tuple[int, bytes]], done: int | None
) -> Failure:
    """The failure with what it left in the database."""
    if isinstance(exc, FairqError):
        text = f"lines {chunk[0][0]} to {chunk[-1][0]}: {exc}"
        exc = Failure(text, hint=exc.hint, code=exc.code, exit_code=exc.exit_code)
    elif isinstance(exc, KeyboardInterrupt):
        exc = Failure("interrupted", code="interrupted")
    kept = f"Lines 1 to {done} are created. Go on with --skip {done}." if done else "Nothing was created."
    exc.hint = " ".join(part for part in (exc.hint, kept) if part)
    return exc


# --- cancel, retry ---------------------------------------------------------------------------------


def ago(text: str) -> datetime:
    """The type of a time, or of a length of time before now."""
    length = parse_duration(text)
    return when(text) if length is None else datetime.now(UTC) - length


ids_or_queue = together(
    click.argument("ids", nargs=-1, metavar="[ID...]"),
    option("--queue NAME", "Instead of ids: all tasks of this queue."),
    option("--group group_key GROUP", "With --queue: only those of this group."),
    option("--kind NAME", "With --queue: only those of this kind."),
)
without_asking = option("--yes", "With --queue: do not ask for confirmation.")


@command(
    codes={0: "all were live", 1: "some had ended, or never existed; the others are cancelled"},
    rights="fairq_enqueue; with --queue: fairq_admin",
)
@ids_or_queue
@without_asking
def cancel(ids: tuple[str, ...], queue: str | None, yes: bool, **only: Any) -> None:
    """A waiting task never runs. A running one learns it with its worker's next heartbeat; its handler may
    stop at once, later, or not in time. - stands for ids on stdin. With --queue, the command first shows how
    many tasks that are.

    fairq cancel 42 43
    psql -Atc "select id from ..." | fairq cancel -
    fairq cancel --queue docs --group bob
    """
    done, not_done = "cancelled", "not live: it has ended, or never existed"
    _end("Cancel", ids, queue, yes, only, client.cancel, client.cancel_many, done, not_done)


@command(
    codes={0: "all will run again", 1: "there was nothing to do for some; the others will run again"},
    rights="fairq_admin",
)
@ids_or_queue
@option(
    "--outcome",
    "With --queue: only those with this outcome. Default: failed.",
    type=click.Choice(["failed", "cancelled", "expired"]),
)
@option("--since TIME", "With --queue: only those that ended since then: 2h, or a time.", type=ago)
@without_asking
def retry(ids: tuple[str, ...], queue: str | None, yes: bool, **only: Any) -> None:
    """A task that failed, expired or was cancelled gets one more attempt than it had. One that is scheduled,
    or waits for its back-off, may run now. Others stay unchanged. - stands for ids on stdin. With --queue,
    the command first shows how many tasks that are.

    fairq retry 42 43
    psql -Atc "select id from fairq.finished_tasks where ..." | fairq retry -
    fairq retry --queue docs --kind parse
    """
    done = "will run again"
    not_done = "nothing to do: it is unknown, succeeded, running, or already in line"
    _end("Retry", ids, queue, yes, only, client.retry, client.retry_many, done, not_done)


def _end(
    verb: str,
    ids: tuple[str, ...],
    queue: str | None,
    yes: bool,
    only: dict[str, Any],
    each: Callable[[Connection, int], object],
    many: Callable[..., int],
    done: str,
    not_done: str,
) -> None:
    """Cancel or retry the named tasks or, with a queue, count its tasks, ask, and do it to all of them."""
    only = {name: value for name, value in only.items() if value is not None}
    if queue is None:
        if only or yes:
            raise click.UsageError("Add --queue NAME.")
        if not ids:
            raise click.UsageError("Name ids, or --queue NAME.")
        with session() as conn, conn.transaction():
            answers = {task_id: each(conn, task_id) is True for task_id in task_ids(ids)}
        _tell(answers, done, not_done)
        return
    if ids:
        raise click.UsageError("Name ids or --queue, not both.")
    is_asked = asks(yes)
    with session() as conn, conn.transaction():
        if is_asked:
            found = many(conn, queue, **only, dry_run=True)
            if not found:
                show({"queue": queue, "tasks": 0}, "No such tasks.")
                return
            click.confirm(f"{verb} {count(found, 'task')} of queue {clean(queue)}?", abort=True)
        ended = many(conn, queue, **only)
    show({"queue": queue, "tasks": ended}, f"{count(ended, 'task')} {done}.")


def _tell(answers: dict[int, bool], done: str, not_done: str) -> None:
    accepted = [task_id for task_id, yes in answers.items() if yes]
    refused = [task_id for task_id, yes in answers.items() if not yes]
    lines = [f"{count(len(accepted), 'task')} {done}."] if accepted or not refused else []
    lines += [f"{task_id}: {not_done}" for task_id in refused[:20]]
    if len(refused) > 20:
        lines.append(f"… and {len(refused) - 20:,} more")
    show({"accepted": accepted, "refused": refused}, "\n".join(lines))
    if refused:
        raise click.exceptions.Exit(Exit.NO)


# --- result ----------------------------------------------------------------------------------------


@command(
    codes={0: "it succeeded", 1: "it did not succeed, is unknown, or has not ended (in time)"},
    rights="fairq_enqueue",
)
@click.argument("task_id", metavar="ID", type=ident)
@option("--wait", "Wait until the task has ended.")
@option("--timeout TIME", "Wait no longer than this: 30s, 10m.", type=duration)
def result(task_id: int, wait: bool, timeout: timedelta | None) -> None:
    """Prints what the handler returned on stdout as JSON (null if the task stores no results), and anything
    else on stderr.

    fairq result 42
    fairq result 42 --wait --timeout 10m
    id=$(fairq enqueue bob '{"file": "a.pdf"}') && fairq result "$id" --wait
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait.")
    seconds = (timeout.total_seconds() if timeout is not None else None) if wait else 0
    with session() as conn:
        try:
            found = results.result(conn, task_id, timeout=seconds)
        except ResultTimeout:
            if wait:
                raise
            raise Failure(
                f"task {task_id} has not ended",
                hint=f"To wait: fairq result {task_id} --wait. To see why it waits: fairq explain {task_id}",
                code="not_ended",
            ) from None
    if wants_json():
        show(plain(found))
        raise click.exceptions.Exit(Exit.OK if found.outcome == "succeeded" else Exit.NO)
    if found.outcome != "succeeded":
        ended = "was cancelled" if found.outcome == "cancelled" else found.outcome
        at = f"{found.finished_at:%Y-%m-%d %H:%M:%S %Z}"
        raise Failure(f"task {found.id} {ended} at {at}", hint=told(found.error))
    text = json.dumps(found.result, indent=2, ensure_ascii=False)
    click.echo("\n".join(map(clean, text.split("\n"))))
