"""Every function of `fairq` that takes a connection, with odd values: an answer, or an error of ours."""

import inspect
import math
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from random import Random
from typing import Any

import fairq
from fairq import client, policies, results
from fairq.errors import DatabaseError
from fairq.options import EnqueueManyOptions, EnqueueOptions
from tests.fuzz.values import TEXTS
from tests.support.calls import Conn, create_each
from tests.support.database import Database

CALLS = max(400, int(os.environ.get("FAIRQ_TEST_FUZZ", "0")) // 10)

LOOP: list[Any] = []
LOOP.append(LOOP)
VALUES: list[Any] = [
    *TEXTS,
    *["\0", "a\0b", "\udcff", "\ud800", b"bytes", b"\xff"],
    *[0, 1, -1, 3, True, False, 2**31, 2**63, -(2**63) - 1, 10**400],
    *[0.0, -0.0, 0.5, math.nan, math.inf, -math.inf, 1e308, 5e-324, Decimal("1"), Decimal("NaN"), 1j],
    *[
        datetime(1, 1, 1),
        datetime.min.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
        datetime.now(UTC),
    ],
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-23))),
    *[timedelta(0), timedelta.min, timedelta.max, timedelta(seconds=5), timedelta(microseconds=1)],
    *[[], {}, (), set(), [None], {"a": 1}, {1: 2}, {"\0": "\ud800"}, [math.nan], LOOP, object(), object, len],
    *["[" * 10_000, [[[[]]]], {"deep": {"deeper": {}}}],
]
SANE: dict[str, list[Any]] = {
    "queue": ["default", "other"],
    "group_key": ["bob", "ada"],
    "concurrency_key": ["key"],
    "items": [[("bob", {})], [("bob", {}), ("ada", None)], []],
    "timeout": [0.01],
}


def functions() -> dict[str, tuple[Callable[..., Any], list[str], list[str]]]:
    """What `fairq` exports and takes a connection, with its arguments and its keywords."""
    settings = {
        "configure_queue": policies.QueueSettings,
        "configure_group": policies.GroupSettings,
        "configure_key": policies.KeySettings,
        "configure_cluster": policies.ClusterSettings,
        "enqueue": EnqueueOptions,
        "enqueue_many": EnqueueManyOptions,
    }
    found: dict[str, tuple[Callable[..., Any], list[str], list[str]]] = {}
    for module in (client, policies, results):
        for name in module.__all__:
            function = getattr(fairq, name, None)
            if name not in fairq.__all__ or not inspect.isfunction(function):
                continue
            named = list(inspect.signature(function).parameters.values())
            options = list(settings[name].__annotations__) if name in settings else []
            needed = [
                p.name for p in named[1:] if p.kind is not p.VAR_KEYWORD and p.kind is not p.KEYWORD_ONLY
            ]
            options += [p.name for p in named if p.kind is p.KEYWORD_ONLY]
            found[name] = (function, needed, options)
    return found


def call(conn: Conn, random: Random, name: str, ids: list[int]) -> str | None:
    """One call; what is wrong with how it ended."""
    function, needed, options = functions()[name]
    odds = random.choice([0, 0.1, 0.3, 1])

    def value(argument: str) -> Any:
        if random.random() < odds or (argument not in SANE and argument != "id"):
            return random.choice(VALUES)
        return random.choice(ids) if argument == "id" else random.choice(SANE[argument])

    given = [value(argument) for argument in needed]
    named = {
        option: value(option) for option in random.sample(options, min(len(options), random.randrange(3)))
    }
    if name == "result" and (named.get("timeout") is None or isinstance(named["timeout"], int | float)):
        named["timeout"] = 0.01  # or it would wait for as long
    try:
        function(conn, *given, **named)
    except fairq.FairqError as exc:
        if isinstance(exc, DatabaseError) or not str(exc) or len(str(exc)) > 1000:
            return f"{name}({given!r:.300}, {named!r:.300}): {type(exc).__name__} {exc}"
    except TypeError as exc:
        if "is not iterable" not in str(exc):
            return f"{name}({given!r:.300}, {named!r:.300}): {exc}"
    except Exception as exc:
        return f"{name}({given!r:.300}, {named!r:.300}): {type(exc).__name__} {exc}"
    return None


def test_every_function_of_the_package_refuses_odd_values_in_its_own_words(database: Database) -> None:
    assert len(functions()) > 12
    conn = database.connect()
    ids = create_each(conn, "bob", "ada")
    conn.commit()
    conn.execute("select fairq.configure_queue('other')")
    random, found = Random(7), dict[str, str]()
    for _ in range(CALLS):
        name = random.choice(list(functions()))
        if wrong := call(conn, random, name, ids):
            found.setdefault(f"{name} {wrong.rpartition('): ')[2][:40]}", wrong)
        conn.rollback() if random.random() < 0.8 or conn.info.transaction_status == 3 else conn.commit()
    assert not found, "\n\n".join(found.values())
