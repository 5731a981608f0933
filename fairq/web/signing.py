"""Passes: texts that let one tenant see its own standing until they expire. Pure functions.

A pass has the queue, the group and the time at which it expires, with an HMAC of that text. So nothing has to
be stored or looked up; whoever has the secret can make any pass.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from urllib.parse import urlencode

from fairq.errors import ConfigurationError

SHORTEST_SECRET = 16
LONGEST_PASS = 16_384  # do not decode megabytes; with all its escapes a name has at most 3,000 bytes


@dataclass(frozen=True, slots=True)
class Pass:
    """The content of a pass. `expires` is in seconds since 1970."""

    queue: str
    group_key: str
    expires: int


def link(secret: str | bytes, queue: str, group_key: str, *, seconds: float) -> str:
    """A path below the page for one tenant, `mine?pass=…`, which works for so many seconds."""
    shown = Pass(queue, group_key, int(time.time() + seconds))
    return "mine?" + urlencode({"pass": sign_pass(secret, shown)})


def sign_pass(secret: str | bytes, shown: Pass) -> str:
    said = json.dumps([shown.queue, shown.group_key, shown.expires]).encode()
    return f"{said.hex()}.{_mac(secret, said).hex()}"


def read_pass(secret: str | bytes, text: str, now: float) -> Pass | None:
    """The content of a pass; None if it was not signed with this secret, or has expired."""
    if len(text) > LONGEST_PASS:
        return None
    try:
        said, mac = map(bytes.fromhex, text.split("."))
    except ValueError:
        return None
    # Accept only the one spelling that we make.
    if text != f"{said.hex()}.{mac.hex()}" or not hmac.compare_digest(mac, _mac(secret, said)):
        return None
    queue, group_key, expires = json.loads(said)
    return Pass(queue, group_key, expires) if now < expires else None


def check_secret(secret: str | bytes) -> None:
    """Raise ConfigurationError if the secret is too short."""
    _mac(secret, b"")


def _mac(secret: str | bytes, said: bytes) -> bytes:
    key = secret.encode() if isinstance(secret, str) else secret
    if len(key) < SHORTEST_SECRET:
        raise ConfigurationError(
            f"the secret has {len(key)} bytes",
            f"It needs {SHORTEST_SECRET}: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return hmac.digest(key, b"fairq pass 1\0" + said, hashlib.sha256)
