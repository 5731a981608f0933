"""What an application puts around its handlers: middleware, a session, a lifespan.

def timed(ctx, call_next):
    began = time.perf_counter()
    try:
        return call_next()          # in an async one: await call_next()
    finally:
        print(ctx.kind, time.perf_counter() - began)

app = fairq.App(middleware=[timed], lifespan=open_pool)
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

from fairq.context import Context
from fairq.errors import ConfigurationError
from fairq.task import Task, checked, is_async

__all__ = ["Lifespan", "Middleware", "Runner"]
__all__ += ["around", "check_lifespan", "check_middleware", "living", "name_of", "runner"]

AnyTask: TypeAlias = Task[Any, ..., Any]
Manager: TypeAlias = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
Around: TypeAlias = Callable[[Context, Callable[[], Any]], Any]
# One function, or one for each kind of handler.
Middleware: TypeAlias = Around | tuple[Around, ...]
Lifespan: TypeAlias = Callable[[], Manager]
# Calls a handler with its payload as JSON text, and returns its result or, if it is async, its coroutine.
Runner: TypeAlias = Callable[[str, Any], Any]


def check_middleware(given: Iterable[Middleware]) -> list[Middleware]:
    """The middleware as a list. Raises ConfigurationError for what cannot go around a handler."""
    hint = "Pass a list of functions: def timed(ctx, call_next): return call_next()"
    if callable(given):
        raise ConfigurationError(f"middleware={given!r:.60} is no list", hint)
    listed = list(given)
    for each in (each for one in listed for each in (one if isinstance(one, tuple) else (one,))):
        if not callable(each) or _is_generator(each):
            what = "is a generator" if callable(each) else "is no function"
            raise ConfigurationError(f"the middleware {each!r:.60} {what}", hint)
    return listed


def check_lifespan(given: Lifespan | None) -> Lifespan | None:
    if given is not None and (not callable(given) or _is_generator(given)):
        raise ConfigurationError(
            f"the lifespan {given!r:.60} opens no context",
            "Decorate a function that yields with contextlib.contextmanager or asynccontextmanager.",
        )
    return given


def _is_generator(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def around(task: AnyTask, middleware: Iterable[Middleware]) -> list[Around]:
    """The middleware for a handler, the first outermost: async around async, sync around sync."""
    every = (each for one in middleware for each in (one if isinstance(one, tuple) else (one,)))
    return [each for each in every if is_async(each) == task.is_async]


def runner(task: AnyTask, middleware: Iterable[Middleware], *, session: bool = True) -> Runner:
    """How to run a handler. Without `session`, the caller sets `ctx.session` and ends the task."""
    run: Runner = task.run
    if task.session is not None and session:
        run = (_in_async_session if task.is_async else _in_session)(task, run)
    for each in reversed(around(task, middleware)):
        run = _within(each, run)
    return run


def _within(middleware: Around, run: Runner) -> Runner:
    return lambda text, ctx: middleware(ctx, partial(run, text, ctx))


# --- A session ---------------------------------------------------------------------------------------
# Leaving it without an error commits. The end of the task is written just before.


def _in_session(task: AnyTask, run: Runner) -> Runner:
    opened = _opener(task, "__enter__")

    def in_session(text: str, ctx: Context) -> Any:
        with opened(ctx) as ctx.session:
            result = checked(run(text, ctx))
            task.finish_in_session(ctx, result)
        return result

    return in_session


def _in_async_session(task: AnyTask, run: Runner) -> Runner:
    opened = _opener(task, "__aenter__")

    async def in_session(text: str, ctx: Context) -> Any:
        async with opened(ctx) as ctx.session:
            result = checked(await run(text, ctx))
            await task.finish_in_session(ctx, result)
        return result

    return in_session


def _opener(task: AnyTask, enter: str) -> Callable[[Context], Any]:
    # An engine or sessionmaker of SQLAlchemy: `begin` commits at the end.
    make: Any = getattr(task.session, "begin", task.session)
    takes_context = any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in inspect.signature(make).parameters.values()
    )

    def opened(ctx: Context) -> Any:
        manager = make(ctx) if takes_context else make()
        if not hasattr(manager, enter):
            if enter == "__aenter__" and hasattr(manager, "close"):
                manager.close()  # a connection that was already opened
            raise ConfigurationError(
                f"the session of task {task.kind!r} is a {type(manager).__name__} without {enter}",
                "Async handlers need an async context manager, sync handlers a plain one.",
            )
        return manager

    return opened


# --- A lifespan ----------------------------------------------------------------------------------------


def name_of(lifespan: Lifespan | None) -> str:
    return f"{getattr(lifespan, '__module__', '')}.{getattr(lifespan, '__qualname__', repr(lifespan))}"


@asynccontextmanager
async def living(lifespan: Lifespan | None) -> AsyncIterator[Any]:
    """The app's lifespan, sync or async, around the life of a worker process. Yields `ctx.state`."""
    manager = nullcontext() if lifespan is None else lifespan()
    if isinstance(manager, AbstractAsyncContextManager):
        async with manager as state:
            yield state
    else:
        with manager as state:
            yield state
