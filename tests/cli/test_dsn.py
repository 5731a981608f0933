"""Where the connection string comes from; its password is never shown."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fairq import dsn

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("given_", "environ", "expected"),
    [
        ("postgresql://a/1", {"FAIRQ_DSN": "postgresql://b/2", "DATABASE_URL": "postgresql://c/3"}, "1"),
        (None, {"FAIRQ_DSN": "postgresql://b/2", "DATABASE_URL": "postgresql://c/3"}, "2"),
        (None, {"DATABASE_URL": "postgresql://c/3"}, "3"),
        ("", {"FAIRQ_DSN": " ", "DATABASE_URL": "postgresql://c/3"}, "3"),
    ],
)
def test_the_option_comes_before_fairq_dsn_and_that_before_database_url(
    given_: str | None, environ: dict[str, str], expected: str
) -> None:
    assert conninfo_to_dict(dsn.resolve(given_, environ))["dbname"] == expected


def test_without_any_the_error_names_all_three() -> None:
    with pytest.raises(dsn.DsnError) as caught:
        dsn.resolve(None, {})
    for name in ("--dsn", *dsn.VARIABLES):
        assert name in str(caught.value.hint)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://bob:pw@db:5433/shop?sslmode=require",
        "postgres://bob:pw@db:5433/shop?sslmode=require",
        "postgresql+psycopg://bob:pw@db:5433/shop?sslmode=require",
        "postgresql+asyncpg://bob:pw@db:5433/shop?sslmode=require",
        "postgresql+psycopg2://bob:pw@db:5433/shop?sslmode=require",
        "POSTGRESQL+PSYCOPG://bob:pw@db:5433/shop?sslmode=require",
        "postgis://bob:pw@db:5433/shop?sslmode=require",
        "host=db port=5433 user=bob password=pw dbname=shop sslmode=require",
        "  host=db port=5433 user=bob password=pw dbname=shop sslmode=require\n",
    ],
)
def test_every_usual_spelling_is_understood(text: str) -> None:
    assert conninfo_to_dict(dsn.to_libpq(text)) == {
        "host": "db",
        "port": "5433",
        "user": "bob",
        "password": "pw",
        "dbname": "shop",
        "sslmode": "require",
    }


def test_percent_encoding_is_kept() -> None:
    assert conninfo_to_dict(dsn.to_libpq("postgresql+psycopg://b%40b:p%2Fw@/x?host=%2Frun"))["host"] == "/run"


@pytest.mark.parametrize(
    "text",
    [
        f"mysql://bob:{SECRET}@db/shop",
        f"postgresql://bob:{SECRET}@db:port/shop?nonsense={SECRET}",
        f"password={SECRET} nonsense",
        f"host=db {SECRET}",
        f"password='{SECRET}",
        f"{SECRET}",
        f"postgresql://bob:{SECRET}%ZZ@db/shop",
    ],
)
def test_an_unreadable_dsn_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(dsn.DsnError) as caught:
        dsn.to_libpq(text)
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.hint)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://bob:pw@db/shop", "postgresql://bob:***@db/shop"),
        ("postgresql+psycopg://bob:p@w:x@db/shop", "postgresql+psycopg://bob:***@db/shop"),
        ("postgresql://bob@db/shop", "postgresql://bob@db/shop"),
        ("postgresql://:pw@db/shop", "postgresql://:***@db/shop"),
        ("postgresql://db/shop?user=bob&password=pw&x=1", "postgresql://db/shop?user=bob&password=***&x=1"),
        ("host=db password=pw user=bob", "host=db password=*** user=bob"),
        (r"password = 'p \' w' user=bob", "password = *** user=bob"),
        ("host=db sslpassword=pw", "host=db sslpassword=***"),
        (
            "cannot reach postgresql://bob:pw@db/shop: refused",
            "cannot reach postgresql://bob:***@db/shop: refused",
        ),
        ("nothing secret: a@b.example", "nothing secret: a@b.example"),
    ],
)
def test_passwords_are_masked_wherever_they_stand(text: str, masked: str) -> None:
    assert dsn.mask(text) == masked


# Long enough not to turn up by chance in the rest of the text.
passwords = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=8).map(
    lambda text: f"Qz{text}"
)


@given(passwords)
def test_no_password_survives_in_key_value_pairs(password: str) -> None:
    assert password not in dsn.mask(make_conninfo(host="db", user="bob", password=password, dbname="shop"))


@given(passwords)
def test_no_password_survives_in_a_description(password: str) -> None:
    conninfo = make_conninfo(host="db", user="bob", password=password, dbname="shop", port=5433)
    assert dsn.describe(conninfo) == "bob@db:5433/shop"


@given(st.text())
def test_masking_never_fails_and_a_second_time_changes_nothing(text: str) -> None:
    assert dsn.mask(dsn.mask(text)) == dsn.mask(text)


@pytest.mark.parametrize(
    "part", ["://a:", "://", "password='", "password ", "password=", "://a:b@ ", "\\'", "@"]
)
def test_a_long_text_is_masked_in_one_go(part: str) -> None:
    """A tenant chooses what an error message quotes. Where each part is compared with all later ones, this
    takes hours.
    """
    dsn.mask(f"@ {part * 300_000}")


@given(st.text("ab:/@ '=\\"))
def test_passwords_in_urls_are_those_between_the_user_and_the_last_at_sign(text: str) -> None:
    assert dsn.mask(text) == re.sub(r"(://[^:/@\s]*):\S+@", r"\1:***@", text)


def test_a_description_is_short_and_readable() -> None:
    assert dsn.describe("postgresql+psycopg://bob:pw@db/shop") == "bob@db/shop"
    assert dsn.describe("dbname=shop") == "localhost/shop"
    assert dsn.describe("=") == "a database"


@pytest.mark.parametrize(
    ("spelled", "url"),
    [
        ("host=db port=5433 dbname=shop user=bob", "postgresql://bob@db:5433/shop"),
        (
            "postgresql+psycopg://bob:p%40:s@db/shop?sslmode=require",
            "postgresql://bob:p%40%3As@db/shop?sslmode=require",
        ),
        ("host=/run/x/s port=1 dbname='a b' user=bob", "postgresql://bob@/a%20b?host=%2Frun%2Fx%2Fs&port=1"),
        ("host=a,b port=1,2 dbname=shop", "postgresql:///shop?host=a%2Cb&port=1%2C2"),
        ("password=secret dbname=shop", "postgresql:///shop?password=secret"),
        ("host=::1 user=bob", "postgresql://bob@/?host=%3A%3A1"),
    ],
)
def test_every_spelling_has_a_url(spelled: str, url: str) -> None:
    assert dsn.to_url(spelled) == url
    assert conninfo_to_dict(url) == conninfo_to_dict(dsn.to_libpq(spelled))
