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
        text = sys.stdin.read() if payload == "-" else payload
        value = {} if text is None else json_value(text, "The payload")
        with session() as conn, conn.transaction():
            task_id = client.enqueue(conn, group, value, **options)
        answer = {"id": task_id, "group_key": group, "queue": options["queue"], "kind": options["kind"]}
        show(answer, str(task_id))
        return
    keys = {name: options.pop(name) for name in ("idempotency_key", "concurrency_key", "unique")}
    if payload is not None or any(keys.values()):
        raise click.UsageError("With --from, payloads and keys stand in the lines of the file.")
    with _lines(source) as lines:
        done = _enqueue_many(itertools.islice(lines, skip, None), options, group, batch, commit_each)
    text = f"{count(done['created'], 'task')} of {count(done['groups'], 'group')}"
    text += f": {done['first_id']} to {done['last_id']}."
    show(done, text if done["created"] else "No lines, no tasks.")


def json_value(text: str, what: str) -> Any:
    try:
        return read_json(text)
    except ValueError as exc:
        text = f"{what} is not JSON: {exc}. Mind the shell's quotes: '{{\"a\": 1}}'."
        raise click.UsageError(text) from None


def read_json(text: str) -> Any:
    """Raises ValueError, also for what Python reads and PostgreSQL does not."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as exc:
        raise ValueError(str(exc)) from None


def json_object(text: str | None, what: str) -> dict[str, Any] | None:
    value = None if text is None else json_value(text, what)
    if value is not None and not isinstance(value, dict):
        raise click.UsageError(f"{what} is not a JSON object.")
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
    """What a line asks for. Raises BadLine."""
    one_per_line = 'One object per line: {"group_key": "bob"}'
    try:
        value = read_json(text.decode())
    except ValueError as exc:
        raise BadLine(number, f"not JSON: {exc}", one_per_line) from None
    if not isinstance(value, dict):
        raise BadLine(number, "not a JSON object", one_per_line)
    if unknown := sorted(value.keys() - FIELDS):
        hint = f"Known are {', '.join(sorted(FIELDS))}. The task's own data belongs into payload."
        raise BadLine(number, f"unknown field {clean(unknown[0])!r}", hint)
    group_key, payload = value.pop("group_key", group), value.pop("payload", {})
    if group_key is None:
        hint = "Put it into the line, or name a GROUP for all that have none."
        raise BadLine(number, "no group_key", hint)
    given = {name: _option(number, name, value[name], now) for name in value if value[name] is not None}
    own = {name: given.pop(name) for name in OF_ITEMS if name in given}
    return Task(number, {**defaults, **given}, Item(group_key, payload, **own))


def _option(number: int, name: str, value: Any, now: datetime) -> Any:
    """A field as JSON has it, as the option of that name takes it."""
    kind = options_of(EnqueueOptions)[name].type
    if kind is datetime:
        at = parse_when(value, now) if isinstance(value, str) else None
        if at is None:
            hint = "A time with its zone, 2030-01-31T08:00:00+00:00, or +10m."
            raise BadLine(number, f"{name} is {value!r:.60}", hint)
        return at
    if kind is timedelta:
        length = parse_duration(value) if isinstance(value, str) else value
        if not isinstance(length, timedelta | int | float):
            raise BadLine(number, f"{name} is {value!r:.60}", "Seconds, or 30s, 10m, 2h.")
        return length
    if kind is Mapping and not isinstance(value, dict):
        raise BadLine(number, f"{name} is not an object")
    return value


@contextlib.contextmanager
def _lines(source: str) -> Iterator[Iterator[tuple[int, bytes]]]:
    """The lines of a file that hold something, by their numbers, with a progress bar on a terminal."""
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
    with session() as conn, contextlib.nullcontext() if commit_each else conn.transaction():
        while chunk := list(itertools.islice(lines, batch)):
            try:
                found = [read_line(*line, options, group, now) for line in chunk]
                with conn.transaction() if commit_each else contextlib.nullcontext():
                    ids = _create(conn, found)
            except (Failure, FairqError) as exc:
                raise _stopped(exc, chunk[0][0], chunk[-1][0], done if commit_each else None) from exc
            created += len(ids)
            groups.update(str(task.item.group_key) for task in found)
            first, last, done = first or ids[0], ids[-1], chunk[-1][0]
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
        for task in found:  # if it is not the database that refuses, it does so again, and we know which line
            try:
                client.create_many_call([task.item], task.options)
            except FairqError as own:
                raise BadLine(task.line, str(own).replace("items[0].", ""), own.hint) from None
        if len(found) == 1:
            raise BadLine(found[0].line, str(exc), exc.hint) from exc
        raise


def _stopped(exc: Failure | FairqError, first: int, last: int, done: int | None) -> Failure:
    """Where it stopped, and what of the file is in the database."""
    if isinstance(exc, FairqError):
        exc = Failure(
            f"lines {first} to {last}: {exc}", hint=exc.hint, code=exc.code, exit_code=exc.exit_code
        )
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


ids_or_queue = together(
    click.argument("ids", nargs=-1, metavar="[ID...]"),
    option("--queue NAME", "Instead of ids: the tasks of this queue."),
    option("--group group_key GROUP", "With --queue: only those of this group."),
    option("--kind NAME", "With --queue: only those of this kind."),
)
without_asking = option("--yes", "With --queue: do not ask.")


@command(
    codes={0: "all were live", 1: "some had ended, or never were; the others are cancelled"},
    rights="fairq_enqueue; with --queue: fairq_admin",
)
@ids_or_queue
@without_asking
def cancel(ids: tuple[str, ...], queue: str | None, yes: bool, **only: Any) -> None:
    """One that waits never runs. One that runs is told with its worker's next heartbeat; its handler may stop
    at once, later, or too late. - stands for ids on stdin. With --queue, how many it would be is shown first.

    fairq cancel 42 43
    psql -Atc "select id from ..." | fairq cancel -
    fairq cancel --queue docs --group bob
    """
    done, not_done = "cancelled", "not live: ended already, or never created"
    _end("Cancel", ids, queue, yes, only, client.cancel, client.cancel_many, done, not_done)


@command(
    codes={0: "all go again", 1: "some had nothing to be done; the others go again"},
    rights="fairq_admin",
)
@ids_or_queue
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
    done = "will run again"
    not_done = "nothing to do: unknown, succeeded, running, or in line already"
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
    """Do it to the tasks that were named; or, with a queue, count, ask, and do it to all that it has."""
    only = {name: value for name, value in only.items() if value is not None}
    if queue is None:
        if only or yes:
            raise click.UsageError("Of which queue? Name it: --queue NAME.")
        if not ids:
            raise click.UsageError("Which tasks? Name ids, or --queue NAME.")
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
