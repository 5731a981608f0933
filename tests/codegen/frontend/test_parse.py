"""Query files: how they are split, how placeholders are written, and which mistakes are reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairq.codegen.model import GenerationError
from fairq.codegen.parse import Placeholder, parse_file, tokens


def only(sql: str) -> tuple[str, list[Placeholder]]:
    (statement,) = parse_file(f"-- name: Q :many\n{sql}", "q.sql")
    return statement.text, list(statement.placeholders)


def test_a_file_is_split_at_its_name_lines() -> None:
    first, second = parse_file(
        "-- head of the file\n\n-- name: A :one\n-- What it does.\nselect 1; -- one\n\n"
        "-- name: B :exec\n\ndelete\n"
        "-- between\nfrom t\n",
        "q.sql",
    )
    assert (first.name, first.cmd, first.text, first.line) == ("A", ":one", "select 1", 3)
    assert first.comments == (" What it does.",)
    assert (second.text, second.line, second.lines, second.comments) == (
        "delete\nfrom t",
        7,
        (9, 11),
        (" between",),
    )


@pytest.mark.parametrize(
    ("sql", "text", "names"),
    [
        ("select @a, @b, @a", "select $1, $2, $1", ["a", "b"]),
        ("select sqlc.arg(a), sqlc.arg('b'), sqlc.narg( A )", "select $1, $2, $1", ["a", "b"]),
        ("select SQLC.ARG(a)", "select $1", ["a"]),
        ("select @a::text || @b::text", "select $1::text || $2::text", ["a", "b"]),
        ("select x @> @a, @ -5, @(-5)", "select x @> $1, @ -5, @(-5)", ["a"]),
        (
            "select '@a', \"@a\", $$@a$$, $x$ @a $$ $x$, @b",
            "select '@a', \"@a\", $$@a$$, $x$ @a $$ $x$, $1",
            ["b"],
        ),
        ("select E'\\'@a', 'it''s @a', @b", "select E'\\'@a', 'it''s @a', $1", ["b"]),
        ("select 1 /* @a /* @b */ @c */, @d -- @e", "select 1 /* @a /* @b */ @c */, $1 -- @e", ["d"]),
        ("select a.sqlc_arg, @a", "select a.sqlc_arg, $1", ["a"]),
        ("select 'a;b', @a;", "select 'a;b', $1", ["a"]),
    ],
)
def test_named_placeholders_are_numbered_and_nothing_else_is(sql: str, text: str, names: list[str]) -> None:
    got, placeholders = only(sql)
    assert got == text
    assert [placeholder.name for placeholder in placeholders] == names


def test_narg_anywhere_makes_a_parameter_nullable() -> None:
    assert only("select @a, sqlc.narg(a), @b")[1] == [Placeholder(1, "a", True), Placeholder(2, "b", False)]


def test_a_comment_line_inside_a_string_is_not_a_comment() -> None:
    (statement,) = parse_file("-- name: Q :one\nselect '\n-- not a comment\n  '", "q.sql")
    assert statement.text == "select '\n-- not a comment\n  '"
    (statement,) = parse_file("-- name: Q :one\nselect $$\n-- name: R :one\n$$", "q.sql")
    assert statement.name == "Q"


@pytest.mark.parametrize(
    ("sql", "line", "said"),
    [
        ("select 1;\n", 1, "no name"),
        ("\n-- name: A\nselect 1", 2, "not understood"),
        ("-- name: A :batchmany\nselect 1", 1, ":batchmany"),
        ("-- name: 9 :one\nselect 1", 1, "not understood"),
        ("-- name: A :one\n\n\n", 1, "no statement"),
        ("-- name: A :one\nselect 1;\n\nselect 2", 4, "second statement"),
        ("-- name: A :one\nselect 1,\n sqlc.slice(a)", 3, "arrays"),
        ("-- name: A :one\nselect\n sqlc.args(a)", 3, "sqlc.args"),
        ("-- name: A :one\nselect\n\n sqlc.arg(a, b)", 4, "one name"),
        ("-- name: A :one\nselect $1, @a", 1, "mixed"),
        ("-- name: A :one\nselect $2", 1, "$1 is missing"),
    ],
)
def test_a_mistake_is_told_with_its_place(sql: str, line: int, said: str) -> None:
    with pytest.raises(GenerationError) as caught:
        parse_file(sql, "folder/q.sql")
    assert caught.value.line == line
    assert str(caught.value).startswith(f"folder/q.sql:{line}")
    assert said in str(caught.value)


@given(st.text(alphabet=st.sampled_from("ab1'\"$@;-/*\\\n .:()E")))
def test_tokens_are_the_text_again(sql: str) -> None:
    assert "".join(token.text for token in tokens(sql)) == sql
    assert all(sql[token.start : token.end] == token.text for token in tokens(sql))


@pytest.mark.parametrize("text", ["", "\n", "-- to be written\n", "/* all\n-- name: A :one\nselect 1; */"])
def test_a_file_without_statements_has_none(text: str) -> None:
    assert parse_file(text, "queries.sql") == []
