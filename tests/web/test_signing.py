"""Passes: one tenant's pass shows no other tenant, whatever is done to it."""

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairq.errors import ConfigurationError
from fairq.web.signing import Pass, link, read_pass, sign_pass

SECRET = "a secret of thirty-two bytes or so"
NOW = 1_800_000_000
BOB = Pass("default", "bob", NOW + 60)
FORGERIES = int(os.environ.get("FAIRQ_TEST_PASSES", "4000"))

keys = st.text(min_size=1, max_size=60)


@given(keys, keys, st.integers(NOW + 1, NOW + 10**9))
def test_a_pass_says_what_it_was_signed_for(queue: str, group: str, expires: int) -> None:
    shown = Pass(queue, group, expires)
    assert read_pass(SECRET, sign_pass(SECRET, shown), NOW) == shown


def test_the_longest_names_fit() -> None:
    shown = Pass("\x01" * 200, "\x01" * 500, NOW + 60)
    assert read_pass(SECRET, sign_pass(SECRET, shown), NOW) == shown


def test_a_pass_is_over_when_it_says_so() -> None:
    text = sign_pass(SECRET, BOB)
    assert read_pass(SECRET, text, BOB.expires - 1) == BOB
    assert read_pass(SECRET, text, BOB.expires) is None


def test_another_secret_signs_nothing_here() -> None:
    assert read_pass(SECRET, sign_pass(SECRET + "!", BOB), NOW) is None


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        link("short", "default", "bob", seconds=60)


def test_no_forgery_is_read() -> None:
    """Bits turned, parts of two passes put together, cut, repeated, spelled otherwise, names exchanged."""
    chance = random.Random(7)
    passes = [
        sign_pass(SECRET, Pass("default", name, NOW + 60)) for name in ("bob", "alice", "bobo", "carol/dave")
    ]
    for _ in range(FORGERIES):
        forged = _forge(chance, passes)
        if forged not in passes:
            assert read_pass(SECRET, forged, NOW) is None, forged


def _forge(chance: random.Random, passes: list[str]) -> str:
    one, other = chance.sample(passes, 2)
    said, mac = one.split(".")
    at = chance.randrange(len(one))
    match chance.randrange(8):
        case 0:
            return one[:at] + chance.choice("abcxyz019-_=.%\0é ") + one[at + 1 :]
        case 1:
            return f"{said}.{other.split('.')[1]}"
        case 2:
            return one[:at]
        case 3:
            return one + chance.choice(["=", ".", "a", "00", one])
        case 4:
            raw = bytearray.fromhex(said)
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            return f"{raw.hex()}.{mac}"
        case 5:
            raw_text = bytes.fromhex(said).replace(b"bob", b"eve").replace(b"alice", b"bob")
            return f"{(raw_text + b' ' * chance.randrange(2)).hex()}.{mac}"
        case 6:
            return f"{said}.{chance.randbytes(32).hex()}"
        case _:
            return chance.choice([one.upper(), f" {one}", f"{said[:2]} {said[2:]}.{mac}", f"{one} "])


@given(st.text(max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert read_pass(SECRET, text, NOW) is None
