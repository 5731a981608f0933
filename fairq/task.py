"""A handler and how its tasks are treated.

parse.enqueue(conn, "bob", Parse(file="a.pdf"))       # checked by the type checker
parse(Parse(file="a.pdf"), ctx)                       # the plain function, for tests
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, Unpack, overload

from fairq.backoff import Backoff
from fairq.client import create_call, create_many_call
from fairq.codec import Decoder, decoder, encode, encode_for
from fairq.connections import AsyncConnection, SyncConnection, run
from fairq.context import Context
from fairq.errors import ConfigurationError, NotEncodable
from fairq.options import (
    DEFAULTS,
    BatchOptions,
    Declared,
    Item,
    Seconds,
    TaskOptions,
    refuse_unknown,
    sent,
)

__all__ = ["Declaration", "Task"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Declaration(Declared, total=False):
    """How tasks of one kind are treated. None takes the app's default."""

    retry: Backoff | None
    """What is retried, and when. None: everything, after the queue's back-off."""
    store_result: bool | None
    """Whether what the handler returns is kept."""


class Task(Generic[T, P, R]):
    """A handler and how its tasks are treated. Made by `App.task`; calling it calls the handler."""

    __name__: str

    def __init__(
        self, handler: Callable[Concatenate[T, P], R], *, kind: str, **declared: Unpack[Declaration]
    ) -> None:
        functools.update_wrapper(self, handler)
        self.handler = handler
        retry = declared.pop("retry", None)
        self.store_result = bool(declared.pop("store_result", False))
        refuse_unknown("task", declared, Declared)
        self.options: dict[str, Any] = {**DEFAULTS, "kind": kind}
        self.options = self._with(declared)
        sent(self.options)
        if retry is not None and not isinstance(retry, Backoff):
            raise ConfigurationError(
                f"task {kind!r} has retry={retry!r:.80}",
                "Pass a policy: retry=fairq.Backoff(base=2, cap=600). To limit attempts: max_attempts=5.",
            )
        self.retry = retry
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        )
        self._context_by: Literal["position", "keyword"] | None = None
        self._context_name = ""
        self._read_signature()

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
        return given.total_seconds() if isinstance(given, timedelta) else given

    @property
    def wants_context(self) -> bool:
        return self._context_by is not None

    def __call__(self, payload: T, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.handler(payload, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<fairq task {self.kind!r} on queue {self.queue!r}>"

    # Running it

    def invoke(self, payload: T, ctx: Context) -> Any:
        """Call the handler as its signature asks. Of an async handler, this is the coroutine."""
        handler: Any = self.handler
        if self._context_by == "position":
            answer = handler(payload, ctx)
        elif self._context_by == "keyword":
            answer = handler(payload, **{self._context_name: ctx})
        else:
            answer = handler(payload)
        if isinstance(answer, types.CoroutineType) and not self.is_async:
            # Nobody would await it: the task would count as done with nothing done.
            answer.close()
            raise ConfigurationError(
                f"the handler of task {self.kind!r} is a plain function and returned a coroutine",
                "A decorator between @app.task and an async handler must be an async function itself.",
            )
        return answer

    def decode(self, payload: str | bytes) -> T:
        """The payload, from JSON text, as the handler's annotation says. Raises NotDecodable."""
        return self._decoder(payload)  # type: ignore[no-any-return]

    def decode_plain(self, payload: Any) -> T:
        """The same of JSON that is parsed already."""
        return self._decoder.plain(payload)  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise ConfigurationError when the payload's annotation cannot be decoded."""
        _ = self._decoder

    # Enqueueing it

    @overload
    def enqueue(
        self, conn: SyncConnection, group_key: str, payload: T, **options: Unpack[TaskOptions]
    ) -> int: ...
    @overload
    def enqueue(
        self, conn: AsyncConnection, group_key: str, payload: T, **options: Unpack[TaskOptions]
    ) -> Coroutine[Any, Any, int]: ...
    def enqueue(
        self, conn: Any, group_key: str, payload: T, **options: Unpack[TaskOptions]
    ) -> int | Coroutine[Any, Any, int]:
        """Create a task of this kind in the transaction of `conn`; what is not given is as the task
        declares.
        """
        refuse_unknown("enqueue", options, TaskOptions)
        call = create_call(group_key, self.encode_payload(payload), self._with(options))
        return run(conn, call, "fairq.Task.enqueue")  # type: ignore[no-any-return]

    @overload
    def enqueue_many(
        self,
        conn: SyncConnection,
        items: Iterable[tuple[str, T] | Item],
        **options: Unpack[BatchOptions],
    ) -> list[int]: ...
    @overload
    def enqueue_many(
        self,
        conn: AsyncConnection,
        items: Iterable[tuple[str, T] | Item],
        **options: Unpack[BatchOptions],
    ) -> Coroutine[Any, Any, list[int]]: ...
    def enqueue_many(
        self, conn: Any, items: Iterable[tuple[str, T] | Item], **options: Unpack[BatchOptions]
    ) -> list[int] | Coroutine[Any, Any, list[int]]:
        """Create many tasks of this kind in one round trip; ids in the order of `items`."""
        refuse_unknown("enqueue_many", options, BatchOptions)
        call = create_many_call(items, self._with(options), self.encode_payload)
        return run(conn, call, "fairq.Task.enqueue_many")  # type: ignore[no-any-return]

    def encode_payload(self, payload: T, root: str = "payload") -> str:
        """JSON text of a payload, checked: what the handler could not decode is refused here, not in the
        worker.
        """
        if self._is_surely_decodable(payload):
            return encode(payload, root)
        try:
            return encode_for(self._decoder, payload, root)
        except NotEncodable as exc:
            exc.hint = exc.hint or f"Task {self.kind!r} declares its payload as {self._annotation!r:.200}."
            raise

    # Inside

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What tasks of this kind are told, and what this one is."""
        return self.options | {name: value for name, value in options.items() if value is not None}

    def _is_surely_decodable(self, payload: Any) -> bool:
        # pydantic checked its models when they were made. Dataclasses and structs hold what they were given.
        annotation = self._annotation
        return annotation is Any or (
            type(payload) is annotation and hasattr(annotation, "__pydantic_validator__")
        )

    def _read_signature(self) -> None:
        if inspect.isgeneratorfunction(self.handler) or inspect.isasyncgenfunction(self.handler):
            raise ConfigurationError(
                f"the handler of task {self.kind!r} is a generator; calling it does nothing"
            )
        try:
            parameters = list(inspect.signature(self.handler).parameters.values())
        except ValueError as exc:  # some that are written in C
            raise ConfigurationError(
                f"the handler of task {self.kind!r} says nothing about its parameters",
                "Declare a plain function that calls it.",
            ) from exc
        positional = [
            each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        if not positional:
            raise ConfigurationError(
                f"the handler of task {self.kind!r} takes no payload",
                "First comes the payload, then, if wanted, the fairq.Context: def parse(payload, ctx)",
            )
        self._payload_name = positional[0].name
        if self._payload_name in ("self", "cls"):
            raise ConfigurationError(
                f"the handler of task {self.kind!r} is a method",
                "Declare a plain function that calls the method.",
            )
        rest = [each for each in parameters if each is not positional[0]]
        context = next((each for each in rest if each.name == "ctx" or _is_context(each.annotation)), None)
        if context is not None:
            self._context_name = context.name
            keyword = context.kind == context.KEYWORD_ONLY or context is not rest[0]
            self._context_by = "keyword" if keyword else "position"
        for each in rest:
            optional = each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            if each is not context and not optional:
                raise ConfigurationError(
                    f"the handler of task {self.kind!r} has a parameter {each.name!r} that nobody fills",
                    "A handler takes the payload and, if it wants one, a context: def parse(payload, ctx)",
                )

    @cached_property
    def _annotation(self) -> Any:
        target = self.handler if inspect.isroutine(self.handler) else type(self.handler).__call__
        try:
            hints = typing.get_type_hints(target, include_extras=True)
        except Exception as exc:  # they are code: any error is possible
            raise ConfigurationError(
                f"the annotations of task {self.kind!r} cannot be resolved: {exc}"
            ) from exc
        return hints.get(self._payload_name, Any)

    @cached_property
    def _decoder(self) -> Decoder:
        try:
            return decoder(self._annotation)
        except ConfigurationError as exc:
            raise ConfigurationError(f"the payload of task {self.kind!r}: {exc}", exc.hint) from exc


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.split(".")[-1] == "Context"
    return annotation is Context
