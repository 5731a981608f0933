"""A worker's connections: their settings, and what errors on them mean."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import make_conninfo

from fairq.dsn import patient
from fairq.errors import Unavailable, UnknownWorker, is_retryable, sqlstate_of, translate
from fairq.worker import log

Conn = TypeVar("Conn", bound="psycopg.BaseConnection[Any]")

# What a database, or the way to it, can raise.
FAILURES = (psycopg.Error, OSError)
HUNG_UP = "the database did not answer, so the connection was closed"

# A timeout ended the statement, or its wait for a lock. The session is kept, because a new one has nothing
# cached, would take longer, and might be stopped again.
_STOPPED = ("57014", "55P03")


def conninfo(dsn: str, application_name: str, patience: float = 60.0) -> str:
    """The DSN with what a worker needs: only options of the client, which no pooler refuses.

    A peer that acknowledges nothing for `patience` seconds counts as dead.
    """
    wanted = {
        "target_session_attrs": "read-write",  # a standby is not written to
        "tcp_user_timeout": str(round(patience * 1000)),
        "application_name": application_name,
    }
    return make_conninfo(patient(dsn, **wanted), client_encoding="UTF8")


def hang_up(conn: psycopg.BaseConnection[Any]) -> None:
    """Close a connection from any thread, so that whoever waits for its answer gets an error."""
    with contextlib.suppress(*FAILURES), socket.socket(fileno=os.dup(conn.fileno())) as way:
        way.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def answering(conn: Conn, seconds: float) -> Iterator[Conn]:
    """Inside, a wait for an answer that takes longer fails. Works in any thread."""
    hung_up = threading.Event()

    def impatient() -> None:
        log.warning("no_answer", "no answer for %.0f s; closing the connection", seconds)
        hung_up.set()
        hang_up(conn)

    timer = threading.Timer(seconds, impatient)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # the system has no more threads: go without
        timer.start()
    try:
        yield conn
    except psycopg.OperationalError as exc:
        if hung_up.is_set():
            raise TimeoutError(HUNG_UP) from exc
        raise
    finally:
        timer.cancel()


def is_unknown_worker(exc: BaseException) -> bool:
    return sqlstate_of(exc) == UnknownWorker.sqlstate


def is_about_data(exc: BaseException) -> bool:
    """Whether the values sent are at fault, so that the call would succeed with others."""
    if isinstance(exc, UnicodeError):
        return True
    sqlstate = sqlstate_of(exc)
    if sqlstate is None:
        return isinstance(exc, psycopg.DataError)
    return sqlstate[:2] in ("22", "54") or sqlstate == "QF002"


def is_worth_a_try(exc: BaseException) -> bool:
    """Whether the same statement may succeed later."""
    return isinstance(exc, OSError) or is_retryable(exc) or sqlstate_of(exc) in _STOPPED


def is_down(exc: BaseException) -> bool:
    """Whether the server, or the way to it, is down. A server that stops or refuses a statement is up."""
    return isinstance(translate(exc), Unavailable)


def is_read_only(exc: BaseException) -> bool:
    """Whether the server is no longer the primary, so that a new connection will find another one."""
    return sqlstate_of(exc) == "25006"


def explain(exc: BaseException) -> str:
    """The error for people: without passwords, with its hint."""
    error = translate(exc)
    text = " ".join(str(error).split())
    return f"{text} ({error.hint})" if error.hint else text
