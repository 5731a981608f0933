"""Values that break things, by type, as the texts that PostgreSQL casts without a complaint."""

from collections.abc import Sequence
from random import Random

TEXTS: list[str | None] = [
    None,
    "",
    " ",
    "\n",
    "NULL",
    "{}",
    "'; drop schema fairq; --",
    "%s %I $1 $$",
    "\\",
    "\u202e\u0130\U0001f4a3\ufffd",
    "e\u0301" * 40,
    "x" * 200,
    "x" * 201,
    "\u00e4" * 251,
    "x" * 10_000,
    "#keys",
    "#meters",
    "cluster",
    "queue default",
    "default ",
]
INTEGERS: list[str | None] = [
    None,
    *map(str, [0, 1, -1, 2, 100, 1000, 1_000_001, 2_147_483_647, -2_147_483_648]),
]
BIGINTS: list[str | None] = [*INTEGERS, *map(str, [4_294_967_296, 2**63 - 1, -(2**63)])]
FLOATS: list[str | None] = [
    None,
    *["NaN", "Infinity", "-Infinity", "0", "-0", "-1", "0.0009", "0.001", "1000000", "1e6000000"[:3]],
    *["1e308", "-1e308", "5e-324", "2.2250738585072014e-308"],
]
TIMES: list[str | None] = [
    None,
    "infinity",
    "-infinity",
    "epoch",
    "4714-11-24 00:00:00+00 BC",
    "0001-12-31 23:59:59+00 BC",
    "0001-01-01 00:00:00+00",
    "9999-12-31 00:00:00+00",
    "10000-01-01 00:00:00+00",
    "294276-12-31 23:59:59.999999+00",
    "2000-02-29 12:00:00+15:59",
]
INTERVALS: list[str | None] = [
    None,
    *["0", "-1 second", "1 microsecond", "366 days", "367 days", "1000000000 seconds", "100 years"],
    *["178000000 years", "-178000000 years", "2147483647 days", "-2147483648 days", "9223372036854 seconds"],
    *["1000 years -365000 days", "-1 month 31 days", "1 day -24 hours 1 second"],
]
DOCUMENTS: list[str | None] = [
    None,
    *["null", "true", "0", '""', "[]", "{}", "1e400", "-1e-400", "1e131000", '{"": null, "a": {"": []}}'],
    '{"a": 1, "a": 2}',
    '"\\ud83d\\udca3 \\u202e"',
    "[" * 500 + "]" * 500,
    "[" + ",".join(["0"] * 20_000) + "]",
    '{"weight": "NaN"}',
    '"' + "x" * 300_000 + '"',
]
# A megabyte each: seldom.
LARGE_DOCUMENTS = ['"' + "x" * 2**20 + '"', "[" + ",".join(["1e5"] * 250_000) + "]"]
BOOLEANS: list[str | None] = [None, "true", "false"]

OF_TYPE: dict[str, list[str | None]] = {
    "text": TEXTS,
    "integer": INTEGERS,
    "bigint": BIGINTS,
    "double precision": FLOATS,
    "timestamp with time zone": TIMES,
    "interval": INTERVALS,
    "jsonb": DOCUMENTS,
    "boolean": BOOLEANS,
}


def array(items: Sequence[str | None]) -> str:
    """The text of an array."""
    quoted = (
        "NULL" if item is None else '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for item in items
    )
    return "{" + ",".join(quoted) + "}"


def nasty(random: Random, type_name: str) -> str | None:
    """A value of this type that somebody might send, and nobody should."""
    if type_name.endswith("[]"):
        return _nasty_array(random, type_name.removesuffix("[]"))
    if type_name == "jsonb" and random.random() < 0.01:
        return random.choice(LARGE_DOCUMENTS)
    return random.choice(OF_TYPE[type_name])


def _nasty_array(random: Random, type_name: str) -> str | None:
    small = [value for value in OF_TYPE[type_name] if value is None or len(value) < 1000]
    shape = random.random()
    if shape < 0.15:
        return None
    if shape < 0.3:
        return "{}"
    if shape < 0.45:
        two = [random.choice([value for value in small if value]) for _ in range(4)]
        return "{" + array(two[:2]) + "," + array(two[2:]) + "}"
    if shape < 0.55:
        return "[5:6]=" + array(random.choices(small, k=2))
    if shape < 0.557:
        return array([random.choice(small)] * 100_000)
    one = random.choice(OF_TYPE[type_name])
    return array([one, *random.choices(small, k=random.randrange(4)), one][: random.randint(1, 5)])
