"""Names in Python from names in SQL, by the reference's rules."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairq.codegen import names
from fairq.codegen.model import Catalog, Name, Options
from fairq.codegen.names import singular

CATALOG = Catalog()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tasks", "Tasks"),
        ("block_state", "BlockState"),
        ("HTTPCode", "HTTPCode"),
        ("_leading", "Leading"),
        ("double__bar", "DoubleBar"),
        ("my table", "My Table"),
        ("a-b.c", "A-B.C"),
        ("über_maß", "ÜberMaß"),
        ("ßeta", "ßeta"),
    ],
)
def test_class_names_capitalise_each_part(name: str, expected: str) -> None:
    assert names.class_name(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PopTasks", "pop_tasks"),
        ("getX", "get_x"),
        ("GetHTTPCode", "get_http_code"),
        ("CountByID2", "count_by_id2"),
        ("X2Y", "x2_y"),
        ("already_snake", "already_snake"),
        ("Get_It", "get__it"),
    ],
)
def test_method_names_are_snake_case(name: str, expected: str) -> None:
    assert names.method_name(name) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("in-progress", "IN_PROGRESS"),
        ("a:b/c", "A_B_C"),
        ("op!en", "OPEN"),
        ("two words", "TWOWORDS"),
        ("!", ""),
    ],
)
def test_enum_members_keep_letters_digits_and_bars(value: str, expected: str) -> None:
    assert names.member_name(value) == expected


def test_another_schema_is_a_prefix_and_the_default_one_is_not() -> None:
    assert names.enum_class_name(Name("public", "state"), CATALOG) == "State"
    assert names.enum_class_name(Name("app", "state"), CATALOG) == "AppState"
    assert names.model_class_name(Name("app", "people"), CATALOG, Options()) == "AppPerson"
    assert (
        names.model_class_name(Name("fairq", "tasks"), Catalog(default_schema="fairq"), Options()) == "Task"
    )


def test_a_name_is_excluded_with_its_prefix_and_in_any_case() -> None:
    options = Options(inflection_exclude_table_names=("App_Data", "tasks"))
    assert names.model_class_name(Name("app", "data"), CATALOG, options) == "AppData"
    assert names.model_class_name(Name("app", "tasks"), CATALOG, options) == "AppTask"
    assert names.model_class_name(Name("public", "data"), CATALOG, options) == "Datum"


@pytest.mark.parametrize(
    ("plural", "expected"),
    [
        ("tasks", "task"),
        ("boxes", "box"),
        ("buses", "bus"),
        ("addresses", "address"),
        ("statuses", "status"),
        ("status", "status"),
        ("queries", "query"),
        ("days", "day"),
        ("wolves", "wolf"),
        ("knives", "knife"),
        ("hives", "hive"),
        ("series", "series"),
        ("movies", "movie"),
        ("analyses", "analysis"),
        ("matrices", "matrix"),
        ("indices", "index"),
        ("quizzes", "quiz"),
        ("oxen", "ox"),
        ("axes", "axis"),
        ("viri", "virus"),
        ("news", "news"),
        ("mice", "mouse"),
        ("user_children", "user_child"),
        ("women", "woman"),
        ("PEOPLE", "PERSON"),
        ("People", "Person"),
        ("pEOPLE", "pEOPLE"),
        ("BOXES", "BOX"),
        ("Police", "Police"),
        ("data", "datum"),
        ("DATA", "DATUM"),
        ("canvas", "canva"),
        ("campus", "campus"),
        ("Meta", "Meta"),
        # what the reference does with words that later releases of its rules know
        ("leaves", "leafe"),
        ("geese", "geese"),
        ("chassis", "chassi"),
        ("", ""),
    ],
)
def test_singulars_are_those_of_the_reference(plural: str, expected: str) -> None:
    assert singular(plural) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ok", "ok"),
        ("class", "class_"),
        ("None", "None_"),
        ("2fa", "_2fa"),
        ("my column", "my_column"),
        ("?", "fallback"),
        ("", "fallback"),
        ("_", "_"),
        ("größe", "größe"),
    ],
)
def test_identifiers_are_what_python_accepts(name: str, expected: str) -> None:
    assert names.identifier(name, "fallback") == expected


@given(st.text())
def test_every_text_becomes_an_identifier(name: str) -> None:
    result = names.identifier(name, "fallback")
    assert result.isidentifier()
    assert not keyword.iskeyword(result)


@given(st.lists(st.sampled_from(["id", "id_2", "id_3", "id_2_2", "name"]), max_size=8))
def test_distinct_names_are_distinct_and_each_first_one_is_kept(given_names: list[str]) -> None:
    result = names.distinct(given_names)
    assert len(set(result)) == len(given_names)
    for index, name in enumerate(given_names):
        if name not in given_names[:index]:
            assert result[index] == name


def test_a_repeated_name_is_numbered_from_two() -> None:
    assert names.distinct(["id", "id", "name", "id"]) == ["id", "id_2", "name", "id_3"]
    assert names.distinct(["id", "id_2", "id"]) == ["id", "id_2", "id_3"]
