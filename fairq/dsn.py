"""Where the connection string comes from, and how to show it without secrets."""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from fairq.errors import FairqError

__all__ = ["VARIABLES", "DsnError", "NoDsn"]
__all__ += ["clean", "describe", "mask", "patient", "resolve", "to_libpq", "to_url"]

VARIABLES = ("FAIRQ_DSN", "DATABASE_URL")

PATIENCE = {
    "connect_timeout": "10",
    "keepalives_idle": "20",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "60000",
}

# SQLAlchemy, Django and Heroku have their own schemes; libpq knows only postgres and postgresql.
_SCHEME = re.compile(r"^(?:postgres|postgresql|postgis|pgsql)(?:\+\w+)?://", re.IGNORECASE)
_WORD = re.compile(r"\S+")
_URL_LOGIN = re.compile(r"://[^:/@]*:")
_WORD_PASSWORD = re.compile(r"(?i)\b((?:ssl)?password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&'\"]+)")


class DsnError(FairqError, code="dsn", exit_code=2):
    """No connection string was given, or it cannot be read. The message contains no secret."""


class NoDsn(DsnError, code="dsn", exit_code=2): ...  # none was given


def resolve(dsn: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The first connection string among the argument, FAIRQ_DSN and DATABASE_URL, ready for libpq."""
    environ = os.environ if environ is None else environ
    for text in (dsn, *(environ.get(name) for name in VARIABLES)):
        if text and text.strip():
            return to_libpq(text)
    hint = "Pass --dsn postgresql://user@host/name, or set FAIRQ_DSN or DATABASE_URL."
    raise NoDsn("no database is named", hint)


def to_libpq(dsn: str) -> str:
    """Turn the SQLAlchemy spelling (postgresql+psycopg://) into libpq's, and check that libpq can read it."""
    text = _SCHEME.sub("postgresql://", dsn.strip())
    try:
        _parsed(text)
    except ValueError:
        # libpq's message quotes the part that is wrong, which may be the password.
        raise DsnError(
            f"the connection string cannot be read: {_outline(text)}",
            "Write postgresql://user:password@host:port/name or host=… dbname=… user=…; "
            "percent-encode special characters in a URL.",
        ) from None
    return text


def to_url(dsn: str) -> str:
    """The same connection string as a URL, for libraries that read no other form."""
    parts = {name: str(value) for name, value in _parsed(to_libpq(dsn)).items() if value is not None}
    names = ("user", "password") if "user" in parts else ()
    login = ":".join(quote(parts.pop(name), safe="") for name in names if name in parts)
    name = quote(parts.pop("dbname", ""), safe="")
    # A socket's folder, several hosts and IPv6 addresses go into the query instead.
    if re.fullmatch(r"[\w.-]+", parts.get("host", "")) and "," not in parts.get("port", ""):
        place = ":".join(parts.pop(name) for name in ("host", "port") if name in parts)
    else:
        place = ""
    query = urlencode(parts, quote_via=quote, safe="")
    return f"postgresql://{login}{'@' if login else ''}{place}/{name}{'?' if query else ''}{query}"


def patient(dsn: str, **wanted: str) -> str:
    """With what is wanted of a connection and not said otherwise; a dead peer is noticed within a minute."""
    from psycopg.conninfo import make_conninfo

    parts, wanted = _parsed(dsn), PATIENCE | wanted
    if os.environ.get("PGCONNECT_TIMEOUT"):
        del wanted["connect_timeout"]
    return make_conninfo(dsn, **{name: each for name, each in wanted.items() if parts.get(name) is None})


def _parsed(text: str) -> dict[str, Any]:
    # Imported here because the message about a missing libpq uses this module.
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        return conninfo_to_dict(text)
    except ProgrammingError as exc:
        raise ValueError from exc


def _outline(text: str) -> str:
    """The part of an unreadable text that may be shown: its scheme, or the word before each '='."""
    if "://" in text:
        return text.split("://", 1)[0] + "://…"
    keys = re.findall(r"(\w+)\s*=", text)
    return " ".join(f"{key}=…" for key in keys) or "neither a URL nor key=value pairs"


def mask(text: str) -> str:
    """Replace every password in a text (a connection string, a log line, an error message) by ***.

    Takes time in proportion to the text, whatever is in it: a tenant's payload may be quoted there.
    """
    if "://" in text and "@" in text:
        text = _WORD.sub(_without_password, text)
    return _WORD_PASSWORD.sub(r"\1***", text)


def _without_password(word: re.Match[str]) -> str:
    text = word[0]
    end = text.rfind("@")  # a password may contain others
    login = _URL_LOGIN.search(text, 0, max(end, 0))
    return text if login is None or login.end() == end else f"{text[: login.end()]}***{text[end:]}"


def clean(text: str) -> str:
    """Escape what a terminal would obey, because names come from anybody. JSON stays valid."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def describe(dsn: str) -> str:
    """A short name for people: bob@db.example:5432/shop."""
    try:
        parts = _parsed(_SCHEME.sub("postgresql://", dsn.strip()))
    except ValueError:
        return "a database"
    user = f"{parts['user']}@" if parts.get("user") else ""
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"{user}{parts.get('host') or 'localhost'}{port}/{parts.get('dbname') or parts.get('user') or ''}"
