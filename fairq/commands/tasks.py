"""`fairq enqueue`, `cancel`, `retry`, `result`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import IO, Any, NamedTuple

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fairq import client, driver, results
from fairq.cli import Exit, Failure, amount, command, option, wants_json
from fairq.commands.common import (
    Connection,
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
@task_options
@option(
    "--from source FILE",
    "Create one task per line of this file; - is stdin. Options and GROUP then fill what a line lacks.",
    type=click.Path(allow_dash=True, dir_okay=False),
)
@option(
    "--commit-each",
    "With --from: commit every batch. Default: the whole file is one transaction, all or nothing.",
)
@amount("--batch", BATCH, "With --from: lines per call.")
@option(
    "--skip N",
    "With --from: leave out the first N lines, to go on where an earlier run stopped.",
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
    """GROUP is the tenant whose turn the task takes; any text, it needs no registration. PAYLOAD is JSON, {}
    by default, - for stdin. The id is printed.

    A file has one JSON object per line: "group_key", "payload", and as you like what the options below say of
    all: "queue", "run_at", "idempotency_key". The file is one transaction: when a line is wrong, none of them
    is created.

    fairq enqueue bob '{"file": "a.pdf"}'
    fairq enqueue bob '{"file": "a.pdf"}' --queue docs --kind parse --run-at +10m
    fairq enqueue --from tasks.jsonl
    jq -c '{group_key: .owner, payload: .}' files.json | fairq enqueue --from -
    fairq enqueue --from huge.jsonl --commit-each    then, if it stopped: --skip N
    """
    options["headers"] = json_object(options["headers"], "--headers")
    if source is None:
        if commit_each or skip:
            raise click.UsageError("--commit-each and --skip belong to --from.")
        if group is None:
            raise click.UsageError(
                "Whose task is it? fairq enqueue GROUP [PAYLOAD], or fairq enqueue --from FILE."
            )
        _enqueue_one(group, payload, options)
        return
    keys = {name: options.pop(name) for name in ("idempotency_key", "concurrency_key", "unique")}
    if payload is not None or any(keys.values()):
        raise click.UsageError("With --from, payloads and keys stand in the lines of the file.")
    with _lines(source) as lines:
        done = _enqueue_many(itertools.islice(lines, skip, None), options, group, batch, commit_each)
    text = f"{count(done['created'], 'task')} of {count(done['groups'], 'group')}"
    text += f": {done['first_id']} to {done['last_id']}."
    show(done, text if done["created"] else "No lines, no tasks.")


def _enqueue_one(group: str, payload: str | None, options: dict[str, Any]) -> None:
    text = sys.stdin.read() if payload == "-" else payload
    value = {} if text is None else json_value(text, "The payload")
    with session() as conn, conn.transaction():
        task_id = client.enqueue(conn, group, value, **options)
    answer = {"id": task_id, "group_key": group, "queue": options["queue"], "kind": options["kind"]}
    show(answer, str(task_id))


def json_value(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        text = f"{what} is not JSON: {exc}. Mind the shell's quotes: '{{\"a\": 1}}'."
        raise click.UsageError(text) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def json_object(text: str | None, what: str) -> dict[str, Any] | None:
    value = None if text is None else json_value(text, what)
    if value is not None and not isinstance(value, dict):
        raise click.UsageError(f"{what} is not a JSON object.")
    return value


# --- enqueue --from --------------------------------------------------------------------------------


class Line(NamedTuple):
    number: int
    text: bytes


class Task(NamedTuple):
    line: int
    options: dict[str, Any]
    item: Item


class BadLine(Failure):
    def __init__(self, number: int, message: str, hint: str | None = None) -> None:
        super().__init__(f"line {number}: {message}", hint=hint, code="invalid_line", exit_code=Exit.NO)


FIELDS = frozenset({"group_key", "payload", *options_of(EnqueueOptions)} - {"unique"})


def read_line(line: Line, defaults: dict[str, Any], group: str | None, now: datetime) -> Task:
    """What a line asks for. Raises BadLine."""
    one_per_line = 'One object per line: {"group_key": "bob"}'
    try:
        value = json.loads(line.text.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise BadLine(line.number, f"not JSON: {exc}", one_per_line) from None
    if not isinstance(value, dict):
        raise BadLine(line.number, "not a JSON object", one_per_line)
    if unknown := sorted(value.keys() - FIELDS):
        hint = f"Known are {', '.join(sorted(FIELDS))}. The task's own data belongs into payload."
        raise BadLine(line.number, f"unknown field {clean(unknown[0])!r}", hint)
    group_key, payload = value.pop("group_key", group), value.pop("payload", {})
    if group_key is None:
        hint = "Put it into the line, or name a GROUP for all that have none."
        raise BadLine(line.number, "no group_key", hint)
    given = {name: _option(line, name, value[name], now) for name in value if value[name] is not None}
    own = {name: given.pop(name) for name in OF_ITEMS if name in given}
    return Task(line.number, {**defaults, **given}, Item(group_key, payload, **own))


def _option(line: Line, name: str, value: Any, now: datetime) -> Any:
    """A field as JSON has it, as the option of that name takes it."""
    kind = options_of(EnqueueOptions)[name].type
    if kind is datetime:
        at = parse_when(value, now) if isinstance(value, str) else None
        if at is None:
            hint = "A time with its zone, 2030-01-31T08:00:00+00:00, or +10m."
            raise BadLine(line.number, f"{name} is {value!r:.60}", hint)
        return at
    if kind is timedelta:
        length = parse_duration(value) if isinstance(value, str) else value
        if not isinstance(length, timedelta | int | float):
            raise BadLine(line.number, f"{name} is {value!r:.60}", "Seconds, or 30s, 10m, 2h.")
        return length
    if kind is Mapping and not isinstance(value, dict):
        raise BadLine(line.number, f"{name} is not an object")
    return value


@contextlib.contextmanager
def _lines(source: str) -> Iterator[Iterator[Line]]:
    """The lines of a file that hold something, with a progress bar on a terminal."""
    try:
        file = click.open_file(source, "rb")
    except OSError as exc:
        raise click.UsageError(f"{source} cannot be read: {exc.strerror}.") from None
    with file, _progress(file, source) as advance:
        yield _numbered(file, advance)


def _numbered(file: IO[bytes], advance: Callable[[int], None]) -> Iterator[Line]:
    end = 0
    for number, text in enumerate(file, 1):
        end += len(text)
        if number % 1000 == 0:
            advance(end)
        if number == 1 and text.startswith(b"\xef\xbb\xbf"):
            text = text[3:]
        if text.strip():
            yield Line(number, text)
    advance(end)


@contextlib.contextmanager
def _progress(file: IO[bytes], source: str) -> Iterator[Callable[[int], None]]:
    err = console(stderr=True)
    if wants_json() or not err.is_terminal:
        yield lambda end: None
        return
    size = None
    with contextlib.suppress(OSError):
        size = os.fstat(file.fileno()).st_size if source != "-" else None
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        bar = progress.add_task("enqueueing", total=size or None)
        yield lambda end: progress.update(bar, completed=end)


def _enqueue_many(
    lines: Iterator[Line], options: dict[str, Any], group: str | None, batch: int, commit_each: bool
) -> dict[str, Any]:
    now = datetime.now(UTC)
    created, first, last, done = 0, None, None, 0
    groups: set[str] = set()
    with session() as conn, contextlib.nullcontext() if commit_each else conn.transaction():
        while chunk := list(itertools.islice(lines, batch)):
            try:
                found = [read_line(line, options, group, now) for line in chunk]
                with conn.transaction() if commit_each else contextlib.nullcontext():
                    ids = _create(conn, found)
            except (Failure, FairqError) as exc:
                raise _stopped(exc, chunk, done if commit_each else None) from exc
            created += len(ids)
            groups.update(str(task.item.group_key) for task in found)
            first, last, done = first or ids[0], ids[-1], chunk[-1].number
    return {"created": created, "groups": len(groups), "first_id": first, "last_id": last}


def _create(conn: Connection, found: list[Task]) -> list[int]:
    """Create the tasks of some lines, in their order, in one round trip.

    create_tasks has one queue, kind and time for all its tasks, so each run of lines that agree in those is a
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
        for task in found:  # if it is not the database that refuses, one of these raises, and says which line
            _check(task)
        if len(found) == 1:
            raise BadLine(found[0].line, str(exc), exc.hint) from exc
        raise


def _check(task: Task) -> None:
    """Everything that can be known without the database. Raises BadLine."""
    try:
        client.create_many_call([task.item], task.options)
    except FairqError as exc:
        raise BadLine(task.line, str(exc).replace("items[0].", ""), exc.hint) from None


def _stopped(exc: Failure | FairqError, chunk: list[Line], done: int | None) -> Failure:
    """Where it stopped, and what of the file is in the database."""
    if isinstance(exc, FairqError):
        where = f"lines {chunk[0].number} to {chunk[-1].number}: {exc}"
        exc = Failure(where, hint=exc.hint, code=exc.code, exit_code=exc.exit_code)
    kept = "Nothing was created."
    if done is not None:
        kept += " Correct it and start again."
    if done:
        kept = f"Lines 1 to {done} are in. Correct it and go on with --skip {done}."
    exc.hint = " ".join(part for part in (exc.hint, kept) if part)
    return exc


# --- cancel, retry ---------------------------------------------------------------------------------


def ago(text: str) -> datetime:
    """The type of an option: a length of time before now, or a time."""
    length = parse_duration(text)
    return when(text) if length is None else datetime.now(UTC) - length


of_queue = option("--queue NAME", "Instead of ids: the tasks of this queue.")
of_group = option("--group group_key GROUP", "With --queue: only those of this group.")
of_kind = option("--kind NAME", "With --queue: only those of this kind.")
without_asking = option("--yes", "With --queue: do not ask.")


@command(
    codes={0: "all were live", 1: "some had ended, or never were; the others are cancelled"},
    rights="fairq_enqueue; with --queue: fairq_admin",
)
@click.argument("ids", nargs=-1, metavar="[ID...]")
@of_queue
@of_group
@of_kind
@without_asking
def cancel(ids: tuple[str, ...], queue: str | None, yes: bool, **only: Any) -> None:
    """One that waits never runs. One that runs is told with its worker's next heartbeat; its handler may stop
    at once, later, or too late. - stands for ids on stdin. With --queue, how many it would be is shown first.

    fairq cancel 42 43
    psql -Atc "select id from ..." | fairq cancel -
    fairq cancel --queue docs --group bob
    """
    if queue is not None:
        _many("Cancel", client.cancel_many, ids, queue, yes, only, "cancelled")
        return
    _refuse_filters(ids, only, yes)
    with session() as conn, conn.transaction():
        answers = {task_id: client.cancel(conn, task_id) for task_id in task_ids(ids)}
    _tell(answers, "cancelled", "not live: ended already, or never created")


@command(
    codes={0: "all go again", 1: "some had nothing to be done; the others go again"},
    rights="fairq_admin",
)
@click.argument("ids", nargs=-1, metavar="[ID...]")
@of_queue
@of_group
@of_kind
@option(
    "--outcome",
    "With --queue: only those that ended so. Default: failed.",
    type=click.Choice(["failed", "cancelled", "expired"]),
)
@option("--since TIME", "With --queue: only those that ended since then: 2h, or a time.", type=ago)
@without_asking
def retry(ids: tuple[str, ...], queue: str | None, yes: bool, **only: Any) -> None:
    """A task that failed, expired or was cancelled gets one attempt more than it had. One that is scheduled
    or waits for its back-off becomes runnable now. Those that succeeded, run or wait in line stay as they
    are. - stands for ids on stdin. With --queue, how many it would be is shown first.

    fairq retry 42 43
    psql -Atc "select id from fairq.finished_tasks where ..." | fairq retry -
    fairq retry --queue docs --kind parse
    """
    if queue is not None:
        _many("Retry", client.retry_many, ids, queue, yes, only, "will run again")
        return
    _refuse_filters(ids, only, yes)
    with session() as conn, conn.transaction():
        answers = {task_id: client.retry(conn, task_id) is True for task_id in task_ids(ids)}
    _tell(answers, "will run again", "nothing to do: unknown, succeeded, running, or in line already")


def _refuse_filters(ids: tuple[str, ...], only: dict[str, Any], yes: bool) -> None:
    if yes or any(value is not None for value in only.values()):
        raise click.UsageError("Of which queue? Name it: --queue NAME.")
    if not ids:
        raise click.UsageError("Which tasks? Name ids, or --queue NAME.")


def _many(
    verb: str,
    function: Callable[..., int],
    ids: tuple[str, ...],
    queue: str,
    yes: bool,
    only: dict[str, Any],
    done: str,
) -> None:
    """Count, ask, and do it."""
    if ids:
        raise click.UsageError("Name ids or --queue, not both.")
    if not yes and wants_json():
        raise click.UsageError("With --json nobody is asked: add --yes.")
    only = {name: value for name, value in only.items() if value is not None}
    with session() as conn, conn.transaction():
        if not yes:
            found = function(conn, queue, **only, dry_run=True)
            if not found:
                show({"queue": queue, "tasks": 0}, "No such tasks.")
                return
            click.confirm(f"{verb} {count(found, 'task')} of queue {clean(queue)}?", abort=True)
        ended = function(conn, queue, **only)
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
    codes={0: "it succeeded", 1: "it failed, was cancelled, expired, is unknown, or has not ended (in time)"},
    rights="fairq_enqueue",
)
@click.argument("task_id", metavar="ID", type=ident)
@option("--wait", "Wait until the task has ended.")
@option("--timeout TIME", "Wait no longer than this: 30s, 10m.", type=duration)
def result(task_id: int, wait: bool, timeout: timedelta | None) -> None:
    """What the handler returned is printed on stdout as JSON (null when results are not stored), anything
    else on stderr.

    fairq result 42
    fairq result 42 --wait --timeout 10m
    id=$(fairq enqueue bob '{"file": "a.pdf"}') && fairq result "$id" --wait
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout belongs to --wait.")
    seconds = (timeout.total_seconds() if timeout is not None else None) if wait else 0
    with session() as conn:
        try:
            found = results.result(conn, task_id, timeout=seconds)
        except ResultTimeout:
            if wait:
                raise
            raise Failure(
                f"task {task_id} has not ended",
                hint=f"Wait for it: fairq result {task_id} --wait. What holds it up: fairq explain {task_id}",
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
