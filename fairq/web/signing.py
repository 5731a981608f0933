"""Passes: texts that let one tenant see its own standing until they expire. Pure functions.

A pass has the queue, the group and the time at which it expires, with an HMAC of that text. So nothing has to
be stored or looked up; whoever has the secret can make any pass.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from urllib.parse import urlencode

from fairq.errors import ConfigurationError

SHORTEST_SECRET = 16
LONGEST_PASS = 8192  # do not decode megabytes; a key has at most some hundred bytes


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
    return f"{_text(said)}.{_text(_mac(secret, said))}"


def read_pass(secret: str | bytes, text: str, now: float) -> Pass | None:
    """The content of a pass; None if it was not signed with this secret, or has expired."""
    if len(text) > LONGEST_PASS or text.count(".") != 1:
        return None
    try:
        said, mac = map(_bytes, text.split("."))
    except (ValueError, binascii.Error):
        return None
    # Base64 has unused bits; accept only the one spelling that we make.
    if text != f"{_text(said)}.{_text(mac)}" or not hmac.compare_digest(mac, _mac(secret, said)):
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


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
