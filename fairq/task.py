"""A declared task: a handler and its options.

parse.enqueue(conn, "bob", Parse(file="a.pdf"))       # type-checked
parse.result(conn, id).value()                        # what the handler returned, with its type
parse(Parse(file="a.pdf"), ctx)                       # the plain function, for tests
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from fairq.backoff import Backoff
from fairq.batch import Batch
from fairq.client import create_call, create_many_call, traced
from fairq.codec import RESOLVABLE, Decoder, decoder, encode, encode_for, fields_decoder
from fairq.connections import AsyncConnection, Steps, SyncConnection, run
from fairq.context import Context
from fairq.errors import ConfigurationError, NotEncodable
from fairq.options import (
    DEFAULTS,
    BatchOptions,
    Declared,
    GroupKey,
    Item,
    Seconds,
    TaskOptions,
    in_seconds,
    is_int,
    refuse_unknown,
    sent,
)
from fairq.results import TaskResult, waiting
from fairq.schedules import Schedule, ScheduleState, declared_steps

__all__ = ["Declaration", "Task", "checked", "is_async"]

T = TypeVar("T")
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
V = TypeVar("V")
Items: TypeAlias = Iterable[tuple[GroupKey, T] | Item]


class Declaration(Declared, total=False):
    """Options of the tasks of one kind. None takes the app's default."""

    retry: Backoff | None
    """What is retried, and when. None: everything, after the queue's back-off."""
    store_result: bool | None
    """Whether to keep what the handler returns."""
    session: Callable[..., Any] | None
    """Opens a transaction around the handler, `ctx.session`, which commits together with the task's end."""


class Task(Generic[T, P, R_co]):
    """A handler and its options. Made by `App.task`; calling it calls the handler.

    `T` is the type of the payload, `P` what the handler takes, `R_co` what it returns.
    """

    __name__: str

    def __init__(
        self,
        handler: Callable[P, R_co],
        *,
        kind: str,
        batch: int | None = None,
        **declared: Unpack[Declaration],
    ) -> None:
        functools.update_wrapper(self, handler)
        self.handler = handler
        retry = declared.pop("retry", None)
        self.store_result = bool(declared.pop("store_result", False))
        self.session = declared.pop("session", None)
        if self.session is not None and not callable(getattr(self.session, "begin", self.session)):
            raise ConfigurationError(
                f"task {kind!r} has session={self.session!r:.60}",
                "Pass a function that opens a transaction, or an engine or sessionmaker of SQLAlchemy.",
            )
        refuse_unknown("task", declared, Declared)
        self.options: dict[str, Any] = {**DEFAULTS, "kind": kind}
        self.options = self._with(declared)
        sent(self.options)
        if retry is not None and not isinstance(retry, Backoff):
            raise ConfigurationError(
                f"task {kind!r} has retry={retry!r:.80}",
                "Pass retry=fairq.Backoff(base=2, cap=600). To limit attempts: max_attempts=5.",
            )
        self.retry = retry
        if batch is not None and not is_int(batch, 1, 10_000):
            hint = "The most tasks for one call: 1 to 10000."
            raise ConfigurationError(f"task {kind!r} has batch={batch!r:.60}", hint)
        self.batch = batch
        self.is_async = is_async(handler)
        self.wants_context = False
        self._payload_name = ""
        self._fields: list[inspect.Parameter] = []
        self._call = self._read_signature()

    @property
    def kind(self) -> str:
        return self.options["kind"]  # type: ignore[no-any-return]

    @property
    def queue(self) -> str:
        return self.options["queue"]  # type: ignore[no-any-return]

    @property
    def timeout(self) -> float | None:
        """Seconds that one attempt may take; None: no limit."""
        given: Seconds | None = self.options.get("timeout")
        return in_seconds(given)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.handler(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<fairq task {self.kind!r} on queue {self.queue!r}>"

    # Running it

    def run(self, text: Any, ctx: Any) -> Any:
        """Call the handler with a payload as JSON text, or a list of those for a batch."""
        if self.batch is None:
            return self.invoke(self.decode(text), ctx)
        payloads: Any = ctx.take_in(text, self.decode)
        return self.invoke(payloads, ctx) if payloads else _nothing() if self.is_async else None

    def invoke(self, payload: T, ctx: Context) -> Any:
        """Call the handler as its signature requires. For an async handler return the coroutine."""
        answer = self._call(payload, ctx)
        if isinstance(answer, types.CoroutineType) and not self.is_async:
            # Nobody would await it, and the task would succeed with nothing done.
            answer.close()
            raise self._wrong(
                "is a plain function and returned a coroutine",
                "A decorator between @app.task and an async handler must be an async function itself.",
            )
        return answer

    def decode(self, payload: str | bytes) -> T:
        """Decode a payload to the handler's annotation. Raises NotDecodable."""
        return self._decoder(payload)  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise ConfigurationError if the payload's annotation cannot be decoded."""
        _ = self._decoder

    # Enqueueing it

    @overload
    def enqueue(
        self, conn: SyncConnection, group_key: GroupKey, payload: T, **options: Unpack[TaskOptions]
    ) -> int: ...
    @overload
    def enqueue(
        self, conn: AsyncConnection, group_key: GroupKey, payload: T, **options: Unpack[TaskOptions]
    ) -> Coroutine[Any, Any, int]: ...
    @overload
    def enqueue(
        self: Task[None, P, R_co], conn: SyncConnection, group_key: GroupKey, **options: Unpack[TaskOptions]
    ) -> int: ...
    @overload
    def enqueue(
        self: Task[None, P, R_co], conn: AsyncConnection, group_key: GroupKey, **options: Unpack[TaskOptions]
    ) -> Coroutine[Any, Any, int]: ...
    def enqueue(
        self, conn: Any, group_key: GroupKey, payload: Any = None, **options: Unpack[TaskOptions]
    ) -> int | Coroutine[Any, Any, int]:
        """Create a task of this kind in the transaction of `conn`. Options default to the declared ones."""
        refuse_unknown("enqueue", options, TaskOptions)
        text = self.encode_payload(payload)
        work = traced(lambda given: create_call(group_key, text, given), self._with(options))
        return run(conn, work, "fairq.Task.enqueue")  # type: ignore[no-any-return]

    @overload
    def enqueue_many(
        self, conn: SyncConnection, items: Items[T], **options: Unpack[BatchOptions]
    ) -> list[int]: ...
    @overload
    def enqueue_many(
        self, conn: AsyncConnection, items: Items[T], **options: Unpack[BatchOptions]
    ) -> Coroutine[Any, Any, list[int]]: ...
    def enqueue_many(
        self, conn: Any, items: Items[T], **options: Unpack[BatchOptions]
    ) -> list[int] | Coroutine[Any, Any, list[int]]:
        """Create many tasks of this kind in one statement, and return their ids in the order of `items`."""
        refuse_unknown("enqueue_many", options, BatchOptions)
        work = traced(lambda given: create_many_call(items, given, self.encode_payload), self._with(options))
        return run(conn, work, "fairq.Task.enqueue_many")  # type: ignore[no-any-return]

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """The payload of a handler with keyword arguments: `parse.arguments(file="a.pdf")`."""
        return inspect.Signature(self._fields).bind(*args, **kwargs).arguments

    # How it ended

    @overload
    def result(
        self: Task[T, P, Coroutine[Any, Any, V]],
        conn: SyncConnection,
        id: int,
        *,
        timeout: float | None = ...,
    ) -> TaskResult[V]: ...
    @overload
    def result(
        self: Task[T, P, Coroutine[Any, Any, V]],
        conn: AsyncConnection,
        id: int,
        *,
        timeout: float | None = ...,
    ) -> Coroutine[Any, Any, TaskResult[V]]: ...
    @overload
    def result(self, conn: SyncConnection, id: int, *, timeout: float | None = ...) -> TaskResult[R_co]: ...
    @overload
    def result(
        self, conn: AsyncConnection, id: int, *, timeout: float | None = ...
    ) -> Coroutine[Any, Any, TaskResult[R_co]]: ...
    def result(self, conn: Any, id: int, *, timeout: float | None = None) -> Any:
        """`fairq.result`, with the result decoded to the handler's return annotation."""
        if not self.store_result:
            raise ConfigurationError(
                f"task {self.kind!r} stores no results",
                "Declare it with store_result=True, or ask fairq.result() how it ended.",
            )
        return run(conn, self._typed(waiting(id, timeout)), "fairq.Task.result")

    def _typed(self, wait: Steps[TaskResult[Any]]) -> Steps[TaskResult[Any]]:
        ended = yield from wait
        if ended.outcome != "succeeded":
            return ended
        return replace(ended, result=self._result_decoder.plain(ended.result, "result"))

    def finish_in_session(self, ctx: Any, result: Any) -> Any:
        if self.batch is not None:
            return ctx.finish_in(ctx.session, result, store=self.store_result)
        if not ctx.finished_in:
            return ctx.finish_in(ctx.session, result if self.store_result else None)
        return _nothing() if self.is_async else None

    def encode_payload(self, payload: T) -> str:
        """The JSON text of a payload. Refuses what the handler could not decode."""
        if self._annotation is Any:
            return encode(payload)
        try:
            return encode_for(self._decoder, payload)
        except NotEncodable as exc:
            exc.hint = exc.hint or f"Task {self.kind!r} takes {inspect.signature(self.handler)!s:.200}."
            raise

    @overload
    def schedule(self, conn: SyncConnection, schedule: Schedule, name: str | None = ...) -> ScheduleState: ...
    @overload
    def schedule(
        self, conn: AsyncConnection, schedule: Schedule, name: str | None = ...
    ) -> Coroutine[Any, Any, ScheduleState]: ...
    def schedule(
        self, conn: Any, schedule: Schedule, name: str | None = None
    ) -> ScheduleState | Coroutine[Any, Any, ScheduleState]:
        """Make the task recur for one group. The name of the schedule defaults to the kind. Needs the rights
        of `fairq_admin`.
        """
        steps = declared_steps(self.kind if name is None else name, self, schedule, None)
        return run(conn, steps, "fairq.Task.schedule")  # type: ignore[no-any-return]

    # Inside

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The declared options, overridden by these."""
        return self.options | {name: value for name, value in options.items() if value is not None}

    def _wrong(self, what: str, hint: str | None = None) -> ConfigurationError:
        return ConfigurationError(f"the handler of task {self.kind!r} {what}", hint)

    def _read_signature(self) -> Callable[[Any, Context], Any]:
        """How to call the handler with a payload and a context."""
        handler: Any = self.handler
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise self._wrong("is a generator, which does nothing when called")
        try:
            rest = list(inspect.signature(handler).parameters.values())
        except ValueError as exc:  # some functions written in C
            hint = "Declare a plain function that calls it."
            raise self._wrong("has no signature", hint) from exc
        first = next((each for each in rest if each.kind in _POSITIONAL), None)
        if first is not None:
            if first.name in ("self", "cls"):
                raise self._wrong("is a method", "Declare a plain function that calls the method.")
            if _is_context(first.annotation):
                raise self._wrong("has its context first", _FORMS)
            self._payload_name = first.name
            rest.remove(first)
        context = next((each for each in rest if each.name == "ctx" or _is_context(each.annotation)), None)
        self.wants_context = context is not None
        for each in rest:
            if first is None and each.kind == each.KEYWORD_ONLY and each is not context:
                self._fields.append(each)
            elif each is not context and (
                first is None or (each.default is each.empty and each.kind not in _VARIADIC)
            ):
                hint = (
                    _FORMS if each.kind not in _VARIADIC else f"{_FORMS} A decorator needs functools.wraps."
                )
                raise self._wrong(f"has a parameter {each.name!r} that gets no value", hint)
        name = "" if context is None else context.name
        if first is None and self.batch is not None:
            raise self._wrong("takes no list", "def index(pages: list[Page], ctx: fairq.Batch)")
        if first is not None and context is not None and context is rest[0] and context.kind in _POSITIONAL:
            return handler  # type: ignore[no-any-return]
        return _caller(handler, first is not None, bool(self._fields), name)

    def _hints(self, *names: str) -> dict[str, Any]:
        """The annotations of these parameters, resolved. The others may be there for type checkers only."""
        target = self.handler if inspect.isroutine(self.handler) else type(self.handler).__call__
        try:
            said = {name: hint for name, hint in inspect.get_annotations(target).items() if name in names}
            whole = types.SimpleNamespace(__annotations__=said)
            where = getattr(inspect.unwrap(target), "__globals__", {})
            return typing.get_type_hints(whole, where, include_extras=True)
        except Exception as exc:  # annotations are code: any error is possible
            text = f"the annotations of task {self.kind!r} cannot be resolved: {exc}"
            raise ConfigurationError(text, RESOLVABLE) from exc

    @cached_property
    def _annotation(self) -> Any:
        if self._fields:
            return dict
        hint = self._hints(self._payload_name).get(self._payload_name, Any)
        if self.batch is None or hint is Any:
            return hint
        if (typing.get_origin(hint) or hint) not in (list, Sequence):
            wrong = f"takes batches, but its payload is a {hint}"
            raise self._wrong(wrong, "Annotate a list: def index(pages: list[Page])")
        return next(iter(typing.get_args(hint)), Any)

    @cached_property
    def _decoder(self) -> Decoder:
        try:
            if not self._fields:
                return decoder(self._annotation)
            hints = self._hints(*(each.name for each in self._fields))
            return fields_decoder(
                (each.name, hints.get(each.name, Any), each.default is each.empty) for each in self._fields
            )
        except ConfigurationError as exc:
            raise ConfigurationError(f"the payload of task {self.kind!r}: {exc}", exc.hint) from exc

    @cached_property
    def _result_decoder(self) -> Decoder:
        try:
            return decoder(Any if self.batch is not None else self._hints("return").get("return", Any))
        except ConfigurationError as exc:
            raise ConfigurationError(f"the result of task {self.kind!r}: {exc}", exc.hint) from exc


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_FORMS = (
    "A handler takes a payload, or keyword arguments, or nothing, and optionally a context:"
    " def parse(payload, ctx), def parse(*, file: str, ctx)."
)


def _caller(handler: Any, has_payload: bool, has_fields: bool, context: str) -> Callable[[Any, Context], Any]:
    def call(payload: Any, ctx: Context) -> Any:
        positional = (payload,) if has_payload else ()
        named = payload if has_fields else {}
        return handler(*positional, **named, **{context: ctx}) if context else handler(*positional, **named)

    return call


async def _nothing() -> None: ...


def checked(result: Any) -> Any:
    """The result of a handler. Raises TypeError for a coroutine or generator: the handler did not run."""
    if result is not None and (
        inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)
    ):
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()
        raise TypeError(
            f"the handler returned a {type(result).__name__}, which nobody runs:"
            " declare it `async def`, without yield"
        )
    return result


def is_async(function: object) -> bool:
    """Whether calling it returns a coroutine. Also works for callable objects."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return _CONTEXT_IN_TEXT.fullmatch(annotation.strip("'\"")) is not None
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        members = [each for each in typing.get_args(annotation) if each is not type(None)]
        return _is_context(members[0])
    return annotation in (Context, Batch)


# As before, but of an annotation that nobody has evaluated: "fairq.Context | None".
_CONTEXT_IN_TEXT = re.compile(
    r"(?:(?:\w+\.)*(?:Optional|Annotated)\[\s*)?(?:\w+\.)*(?:Context|Batch)(?:\s*\|\s*None|,.*)?\s*\]?"
)
