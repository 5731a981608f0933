"""The chart of the last hour, as a browser gets it, compared with the ledger."""

import random
import re
from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from fairq.queries.web import MinutesRow
from fairq.web import timeline
from tests.support.calls import one, run
from tests.support.database import Database
from tests.web.asking import client, page

Conn = psycopg.Connection[Any]
STEP = timedelta(seconds=30)


def write(conn: Conn, begins_at: datetime, used: dict[str, float], slots: int) -> None:
    """Half a minute of the ledger. Values that do not matter here are 0."""
    for group_key, seconds in used.items():
        run(
            conn,
            "insert into fairq.ledger select 0, 1, %s, %s, null, 1, 1, 1, 1, %s, %s, 1, 1, 1, 0, false,"
            " 'default', %s, array_fill(0::bigint, array[21])",
            begins_at,
            begins_at + STEP,
            seconds,
            seconds,
            group_key,
        )
    run(
        conn,
        "insert into fairq.ledger_queues select 0, 1, %s, %s, %s, null, 1, 1, 0, 0, 0, false, 'default',"
        " array_fill(0::bigint, array[21]), array_fill(0::bigint, array[21])",
        slots,
        begins_at,
        begins_at + STEP,
    )


def boxes(path: str) -> list[tuple[float, float, float, float]]:
    """Left, right, upper, lower of each rectangle."""
    number = r"([\d.]+)"
    found = re.findall(rf"M{number} {number}H{number}V{number}H[\d.]+Z", path)
    return [(float(left), float(right), float(upper), float(lower)) for left, upper, right, lower in found]


def test_the_last_hour_is_drawn_as_it_stands_in_the_ledger(conn: Conn, database: Database) -> None:
    luck = random.Random(1)
    groups = [f"group {n}" for n in range(timeline.COLORS + 3)] + [""]
    begin: datetime = one(conn, "select fairq._ledger_begin(clock_timestamp())")
    used: defaultdict[str, float] = defaultdict(float)
    for nth in range(4, 110):
        if nth % 20 == 0:
            continue  # nothing was there to do
        row = {key: luck.uniform(0.1, 3) * (1 + groups.index(key)) for key in groups if luck.random() < 0.8}
        write(conn, begin - nth * STEP, row, 100 if nth > 50 else 60)
        for key, seconds in row.items():
            used[key] += seconds
    run(conn, "select fairq._set_sweep_floor(0, 'ledger', (extract(epoch from %s) * 1000000)::bigint)", begin)
    seen = page(client(database), "/?time=1+h")
    paths = {attrs["class"]: attrs["d"] or "" for tag, attrs in seen.elements if tag == "path"}

    top = 100
    per_area = top / timeline.HEIGHT * timeline.HOUR.total_seconds() / timeline.WIDTH
    drawn = {
        name: sum((right - left) * (lower - upper) for left, right, upper, lower in boxes(path)) * per_area
        for name, path in paths.items()
        if name != "limit"
    }
    most = sorted(sorted(filter(None, groups), key=lambda key: -used[key])[: timeline.COLORS])
    expected = {f"c{number}": used[key] for number, key in enumerate(most)}
    expected[f"c{timeline.COLORS}"] = sum(used[key] for key in groups if key not in most)
    assert drawn == {name: pytest.approx(seconds, rel=0.01) for name, seconds in expected.items()}

    limit = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)", paths["limit"] or "")
    heights = [timeline.HEIGHT * (1 - slots / top) for slots in (100, 60)]
    assert sorted({float(height) for _, height, _ in limit}) == pytest.approx(sorted(heights))
    for name, key in zip(expected, most, strict=False):
        part = used[key] / sum(used.values())
        assert f"{key}: {part:.1%}" in seen.text, name


def test_bands_stand_on_each_other_and_end_at_the_edges() -> None:
    now = datetime(2030, 1, 1, 12, 0)
    rows = [
        MinutesRow(now - timedelta(minutes=61), "a", 60.0, 4),  # half of it is out of the picture
        MinutesRow(now - timedelta(minutes=30), "a", 120.0, 4),
        MinutesRow(now - timedelta(minutes=30), "b", 60.0, 4),
        MinutesRow(now - timedelta(minutes=1), "b", 60.0, 4),  # the ledger has half of it
    ]
    found, limits = timeline.minutes(iter(rows), now - timedelta(seconds=30))
    picture = timeline.draw(found, limits, now - timedelta(seconds=30), timeline.HOUR)
    a, b = (boxes(each.path) for each in picture.bands)
    quarter = timeline.HEIGHT / 4
    minute = timeline.WIDTH / 60
    assert [each[0] for each in a] == pytest.approx([0, timeline.WIDTH / 2 + minute / 2], abs=0.1)
    assert a[0][1] == pytest.approx(minute / 2, abs=0.1)
    assert a[1][2:] == pytest.approx((2 * quarter, 4 * quarter))
    assert b[0][2:] == pytest.approx((quarter, 2 * quarter)), "on top of the other"
    assert b[1][1] == timeline.WIDTH
    assert b[1][2:] == pytest.approx((2 * quarter, 4 * quarter)), "60 seconds in 30 are two slots"


def test_sums_do_not_exceed_the_slots() -> None:
    now = datetime(2030, 1, 1, 12, 0)
    full = timeline.Stretch(now - timedelta(minutes=1), 60.0, {"a": 20.000001, "b": 8.0})
    assert timeline.draw([full], [(full.at, 60.0, 28)], now, timeline.HOUR).top == 28
