"""Handlers that take many tasks of one kind in one call.

@app.task(batch=50)
def index(pages: list[Page], ctx: fairq.Batch) -> list[Exception | None]: ...

Each task is still popped, charged, timed, ended and retried on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairq.connections import Steps, run
from fairq.context import Cancellation, Context

__all__ = ["Batch"]

# How one task ended: the exception, or the result.
End = tuple[Context, BaseException | None, Any]


@dataclass(eq=False)
class Batch:
    """The context of a call for many tasks. `tasks` has each one's context, in the order of the payloads.

    `cancelled` is set when all of them are to stop. Each task also has its own `cancelled`.
    """

    tasks: list[Context]
    cancelled: Cancellation = field(default_factory=Cancellation)
    refused: list[End] = field(default_factory=list)
    """Tasks that the handler never saw: their payloads do not fit, or they were told to stop before."""

    def __post_init__(self) -> None:
        first = self._first = self.tasks[0]
        self.kind, self.queue = first.kind, first.queue
        self.worker_id, self.state = first.worker_id, first.state

    @property
    def session(self) -> Any:
        return self._first.session

    @session.setter
    def session(self, session: Any) -> None:
        for ctx in self.tasks:
            ctx.session = session

    def take_in(self, texts: Sequence[str], decode: Callable[[str], Any]) -> list[Any]:
        """Decode the payloads. One that cannot be decoded fails only its own task."""
        found, tasks = [], []
        for ctx, text in zip(self.tasks, texts, strict=True):
            try:
                ctx.cancelled.raise_if_set()
                found.append(decode(text))
            except Exception as exc:
                self.refused.append((ctx, exc, None))
            else:
                tasks.append(ctx)
        self.tasks = tasks
        return found

    def ends(self, answer: Any) -> list[End]:
        """How each task ended, from what the handler returned: an exception in a task's place fails it."""
        answers = [None] * len(self.tasks) if answer is None else answer
        if not isinstance(answers, list | tuple) or len(answers) != len(self.tasks):
            raise TypeError(
                f"the handler of {len(self.tasks)} tasks returned {answer!r:.60}; it must return None,"
                " or a list with a result or an exception for each task, in their order"
            )
        return self.refused + [
            (ctx, each, None) if isinstance(each, BaseException) else (ctx, None, each)
            for ctx, each in zip(self.tasks, answers, strict=True)
        ]

    def all_ended(self, exception: BaseException | None, answer: Any) -> list[End]:
        if exception is None:
            try:
                return self.ends(answer)
            except TypeError as exc:
                exception = exc
        return self.refused + [(ctx, exception, None) for ctx in self.tasks]

    def finish_in(self, conn: Any, answer: Any, *, store: bool) -> Any:
        """`Context.finish_in` for each task that did not fail."""
        return run(conn, self._finish(answer, store), "fairq.Batch.finish_in")

    def _finish(self, answer: Any, store: bool) -> Steps[None]:
        for ctx, exception, result in self.ends(answer):
            if exception is None and not ctx.finished_in:
                yield ctx.success(result if store else None)

    def __iter__(self) -> Iterator[Context]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)
