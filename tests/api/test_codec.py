"""Payloads to JSON and back to the handler's annotation."""

import dataclasses
import enum
import json
import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Required,
    TypedDict,
    TypeVar,
    Union,
)
from uuid import UUID

import msgspec
import psycopg
import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

import fairq
from fairq.codec import decoder, encode, encode_for
from fairq.errors import ConfigurationError, InvalidPayload, NotDecodable, NotEncodable


class Color(enum.Enum):
    RED = "red"
    DARK = ("dark", 1)


class Level(enum.IntEnum):
    LOW = 1


class Label(enum.StrEnum):
    A = "a"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Tree(NamedTuple):
    name: str
    branches: "list[Tree]" = []  # noqa: RUF012


T = TypeVar("T")


@dataclasses.dataclass
class Found(Generic[T]):
    items: list[T]
    first: T | None = None
    next: "Found[T] | None" = None


@dataclasses.dataclass
class Days(Found[date], Generic[T]):
    owner: T | None = None


class Pair(NamedTuple, Generic[T]):
    left: T
    right: "Pair[T] | None" = None


class Named(TypedDict, Generic[T]):
    value: T


class NamedDay(Named[date]):
    note: str


# What an annotation that is text says of a key, the class does not know.
class Asked(TypedDict, total=False):
    file: "Required[str]"
    pages: "int"


class Told(TypedDict):
    file: "str"
    pages: "NotRequired[Annotated[int, 1]]"
    at: "Annotated[NotRequired[date], 1]"


class Borrowed(typing_extensions.TypedDict):
    at: date
    pages: NotRequired[int]


@dataclasses.dataclass
class Fixed:
    at: Final[date]


class Options(TypedDict):
    dpi: int
    gray: NotRequired[bool]


@dataclasses.dataclass
class Page:
    number: int
    text: str | None = None


@dataclasses.dataclass
class Half:
    number: int
    rest: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Document:
    file: str
    pages: list[Page] = dataclasses.field(default_factory=list)
    at: datetime | None = None
    parent: Optional["Document"] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strict:
    n: int
    doubled: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n is negative")
        object.__setattr__(self, "doubled", 2 * self.n)


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    file: str = pydantic.Field(min_length=1)
    at: datetime
    every: timedelta = timedelta(minutes=1)
    tags: set[str] = set()
    size: int = pydantic.Field(alias="bytes", default=1)


@pydantic.dataclasses.dataclass
class ModelDataclass:
    n: int
    amount: Decimal


class Whole(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    n: int
    numbers: pydantic.Json[list[int]]
    own: str = pydantic.Field(validation_alias="whose", serialization_alias="whose", default="")
    found: str = pydantic.Field(validation_alias=pydantic.AliasChoices("found", "f"), default="")

    @pydantic.computed_field
    def double(self) -> int:
        return 2 * self.n


class Renamed(pydantic.BaseModel):
    size: int = pydantic.Field(serialization_alias="bytes", default=1)


class Received(pydantic.BaseModel):
    user: str = pydantic.Field(validation_alias="userName", default="")


class Hidden(pydantic.BaseModel):
    n: int = pydantic.Field(exclude=True)


class Outer(pydantic.BaseModel):
    inside: list[Renamed] | None


class Struct(msgspec.Struct, tag="s", rename="camel"):
    file_name: str
    at: datetime
    amount: Decimal
    every: timedelta
    parts: list[int] = []


class Compact(msgspec.Struct, array_like=True):
    a: int
    b: str


UserId = NewType("UserId", int)
Name = NewType("Name", str)
MOMENT = datetime(2026, 11, 18, 12, 30, 15, 123456, tzinfo=timezone(timedelta(hours=2)))
DAY = date(2026, 1, 2)
NAIVE = datetime(2026, 11, 18, 12)
IDENTIFIER = UUID("12345678-1234-5678-1234-567812345678")

ROUND_TRIPS: list[tuple[Any, Any, Any]] = [
    (Any, {"a": [1, 2.5, "x", None, True]}, {"a": [1, 2.5, "x", None, True]}),
    (object, [1], [1]),
    (None, None, None),
    (int, 10**300, 10**300),
    (int, -(2**63), -(2**63)),
    (float, 0.1, 0.1),
    (float, 3, 3),
    (bool, True, True),
    (str, "ä 🙂 \x01 \\u0000", "ä 🙂 \x01 \\u0000"),
    (datetime, MOMENT, "2026-11-18T12:30:15.123456+02:00"),
    (datetime, NAIVE, "2026-11-18T12:00:00"),
    (date, date(2026, 1, 2), "2026-01-02"),
    (time, time(1, 2, 3, 4), "01:02:03.000004"),
    (timedelta, timedelta(days=1, seconds=1), 86401),
    (timedelta, timedelta(milliseconds=-1500), -1.5),
    (UUID, IDENTIFIER, "12345678-1234-5678-1234-567812345678"),
    (Decimal, Decimal("1.10"), "1.10"),
    (Decimal, Decimal("1E+400"), "1E+400"),
    (Color, Color.RED, "red"),
    (Color, Color.DARK, ["dark", 1]),
    (Level, Level.LOW, 1),
    (Label, Label.A, "a"),
    (Rights, Rights.READ | Rights.WRITE, 3),
    (Rights, Rights(0), 0),
    (Page, Page(1), {"number": 1, "text": None}),
    (
        Document,
        Document("a", [Page(1, "x")], MOMENT, Document("b")),
        {
            "file": "a",
            "pages": [{"number": 1, "text": "x"}],
            "at": "2026-11-18T12:30:15.123456+02:00",
            "parent": {"file": "b", "pages": [], "at": None, "parent": None},
        },
    ),
    (Strict, Strict(n=2), {"n": 2, "doubled": 4}),
    (Point, Point(1, 2.0), [1, 2.0]),
    (Tree, Tree("a", [Tree("b")]), ["a", [["b", []]]]),
    (Found, Found([1]), {"items": [1], "first": None, "next": None}),
    (
        Found[date],
        Found([DAY], DAY, Found([DAY])),
        {
            "items": ["2026-01-02"],
            "first": "2026-01-02",
            "next": {"items": ["2026-01-02"], "first": None, "next": None},
        },
    ),
    (
        Days[UUID],
        Days([DAY], owner=IDENTIFIER),
        {
            "items": ["2026-01-02"],
            "first": None,
            "next": None,
            "owner": "12345678-1234-5678-1234-567812345678",
        },
    ),
    (Pair[date], Pair(DAY, Pair(DAY)), ["2026-01-02", ["2026-01-02", None]]),
    (Named[date], {"value": DAY}, {"value": "2026-01-02"}),
    (NamedDay, {"value": DAY, "note": "x"}, {"value": "2026-01-02", "note": "x"}),
    (Asked, {"file": "a"}, {"file": "a"}),
    (Told, {"file": "a"}, {"file": "a"}),
    (Told, {"file": "a", "pages": 1, "at": DAY}, {"file": "a", "pages": 1, "at": "2026-01-02"}),
    (Borrowed, {"at": DAY}, {"at": "2026-01-02"}),
    (Fixed, Fixed(DAY), {"at": "2026-01-02"}),
    (Options, {"dpi": 300}, {"dpi": 300}),
    (Options, {"dpi": 300, "gray": True}, {"dpi": 300, "gray": True}),
    (list[Page], [Page(1), Page(2)], [{"number": 1, "text": None}, {"number": 2, "text": None}]),
    (Sequence[int], [1, 2], [1, 2]),
    (tuple[int, ...], (1, 2), [1, 2]),
    (tuple[int, str], (1, "x"), [1, "x"]),
    (tuple, (1, "x"), [1, "x"]),
    (set[int], {3, 1, 2}, [1, 2, 3]),
    (frozenset[str], frozenset("ba"), ["a", "b"]),
    (dict[str, date], {"a": date(2026, 1, 2)}, {"a": "2026-01-02"}),
    (Mapping[str, int], {"a": 1}, {"a": 1}),
    (dict, {"a": 1}, {"a": 1}),
    (dict[Label, date], {Label.A: DAY}, {"a": "2026-01-02"}),
    (dict[Literal["a", "b"], int], {"a": 1}, {"a": 1}),
    (dict[Name, int], {Name("a"): 1}, {"a": 1}),
    (Optional[int], None, None),  # noqa: UP045
    (int | None, 1, 1),
    (Union[int, str], "x", "x"),  # noqa: UP007
    (date | str, date(2026, 1, 2), "2026-01-02"),
    (date | str, "no date", "no date"),
    (Literal["a", 1], 1, 1),
    (UserId, UserId(7), 7),
    (Annotated[int, "a remark"], 7, 7),
    (
        Model,
        Model(file="a", at=MOMENT, every=timedelta(seconds=90), tags={"x"}),
        {
            "file": "a",
            "at": "2026-11-18T12:30:15.123456+02:00",
            "every": "PT1M30S",
            "tags": ["x"],
            "bytes": 1,
        },
    ),
    (
        Whole,
        Whole.model_validate({"n": 1, "numbers": "[1, 2]", "whose": "bob"}),
        {"n": 1, "numbers": "[1,2]", "whose": "bob", "found": ""},
    ),
    (ModelDataclass, ModelDataclass(1, Decimal("1.5")), {"n": 1, "amount": "1.5"}),
    (
        Struct,
        Struct("a", MOMENT, Decimal("1.5"), timedelta(seconds=90)),
        {
            "type": "s",
            "fileName": "a",
            "at": "2026-11-18T12:30:15.123456+02:00",
            "amount": "1.5",
            "every": "PT90S",
            "parts": [],
        },
    ),
    (Compact, Compact(1, "x"), [1, "x"]),
    (
        dict[str, list[Model]],
        {"a": [Model(file="a", at=MOMENT)]},
        {
            "a": [
                {
                    "file": "a",
                    "at": "2026-11-18T12:30:15.123456+02:00",
                    "every": "PT1M",
                    "tags": [],
                    "bytes": 1,
                }
            ]
        },
    ),
]


@pytest.mark.parametrize(
    ("annotation", "value", "plain"), ROUND_TRIPS, ids=[str(each[0])[:40] for each in ROUND_TRIPS]
)
def test_values_survive_encoding_and_decoding(annotation: Any, value: Any, plain: Any) -> None:
    """S30, S31: the JSON is as documented, and decodes to the same value and type."""
    text = encode(value)
    assert json.loads(text) == plain
    back = decoder(annotation)(text)
    assert back == value
    if annotation not in (Any, object, float):
        assert type(back) is type(value)


def test_every_round_trip_survives_the_database(db: psycopg.Connection[Any]) -> None:
    """jsonb reorders keys and keeps numbers exactly; the handler gets the same value."""
    for annotation, value, _ in ROUND_TRIPS:
        row = db.execute("select (%s::jsonb)::text", [encode(value)]).fetchone()
        assert row is not None
        assert decoder(annotation)(row[0]) == value, annotation


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner)
    ),
    max_leaves=30,
)


@given(JSON)
def test_every_json_value_is_its_own_payload(value: Any) -> None:
    assert json.loads(encode(value)) == value
    assert decoder(Any)(encode(value)) == value


@given(
    st.datetimes(timezones=st.timezones()),
    st.timedeltas(),
    st.decimals(allow_nan=False, allow_infinity=False),
)
def test_times_and_decimals_keep_every_digit(moment: datetime, length: timedelta, amount: Decimal) -> None:
    assert decoder(datetime)(encode(moment)) == datetime.fromisoformat(moment.isoformat())
    back = decoder(timedelta)(encode(length))
    # A float of seconds has its microseconds up to some 270 years, and milliseconds ever after.
    if abs(length) < timedelta(days=90_000):
        assert back == length
    else:
        assert abs(back - length) < timedelta(milliseconds=10)
    assert decoder(Decimal)(encode(amount)) == amount


# Annotations with values of theirs; each may be inside the others.
Shape = tuple[Any, st.SearchStrategy[Any]]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
KEYS: list[Shape] = [
    (str, TEXT),
    (int, st.integers(-(10**40), 10**40)),
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (date, st.dates()),
    (time, st.times()),
    (datetime, st.datetimes()),
    (timedelta, st.timedeltas(timedelta(days=-90_000), timedelta(days=90_000))),
    (UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Color, st.sampled_from(Color)),
    (Rights, st.sampled_from([Rights(0), *Rights, Rights.READ | Rights.WRITE])),
    (Literal["a", 1, None], st.sampled_from(["a", 1, None])),
]


def _record(fields: list[Shape], kind: str) -> Shape:
    named = {f"field_{n}": shape for n, shape in enumerate(fields)}
    hints = {name: annotation for name, (annotation, _) in named.items()}
    values = st.fixed_dictionaries({name: strategy for name, (_, strategy) in named.items()})
    if kind == "typed dict":
        return TypedDict("Made", hints), values  # type: ignore[operator]
    made: Any = (
        dataclasses.make_dataclass("Made", hints.items(), frozen=True)
        if kind == "dataclass"
        else NamedTuple("Made", hints.items())
    )
    return made, values.map(lambda given: made(**given))


def _of(generic: Any, *arguments: Any) -> Any:
    return generic[arguments if len(arguments) != 1 else arguments[0]]


def _shapes(inner: st.SearchStrategy[Shape]) -> st.SearchStrategy[Shape]:
    def around(make: Any, values: Any) -> st.SearchStrategy[Shape]:
        return inner.map(lambda each: (make(each[0]), values(each[1])))

    return st.one_of(
        around(lambda one: _of(list, one), lambda some: st.lists(some, max_size=3)),
        around(lambda one: _of(tuple, one, ...), lambda some: st.lists(some, max_size=3).map(tuple)),
        around(lambda one: _of(dict, str, one), lambda some: st.dictionaries(TEXT, some, max_size=3)),
        around(lambda one: _of(Optional, one), lambda some: st.none() | some),
        around(lambda one: _of(Annotated, one, "a remark"), lambda some: some),
        around(
            lambda one: _of(Found, one),
            lambda some: st.tuples(st.lists(some, max_size=2), some).map(lambda two: Found(*two)),
        ),
        st.lists(inner, max_size=3).map(
            lambda several: (
                _of(tuple, *(annotation for annotation, _ in several)),
                st.tuples(*(values for _, values in several)),
            )
        ),
        st.sampled_from(KEYS).map(lambda each: (_of(frozenset, each[0]), st.frozensets(each[1], max_size=3))),
        st.builds(
            _record,
            st.lists(inner, max_size=3),
            st.sampled_from(["dataclass", "named tuple", "typed dict"]),
        ),
    )


@settings(max_examples=40)  # to make a strategy for each takes longer than to try it
@given(st.data())
def test_values_of_any_annotation_survive(data: st.DataObject) -> None:
    annotation, values = data.draw(st.recursive(st.sampled_from(KEYS), _shapes, max_leaves=6))
    value = data.draw(values)
    assert decoder(annotation)(encode(value)) == value
    assert decoder(annotation)(encode_for(decoder(annotation), value)) == value


class Unknown:
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ({"items": [1, 2, 3, {"file": Path("x")}]}, "payload.items[3].file", "has no JSON form"),
        (Document("a", [Page(1), Page(2, b"x")]), "payload.pages[1].text", "base64"),  # type: ignore[arg-type]
        ({"a": {"b": float("nan")}}, "payload.a.b", "finite"),
        ([float("inf")], "payload[0]", "finite"),
        ({"a": -float("inf")}, "payload.a", "finite"),
        ({"a": Decimal("NaN")}, "payload.a", "finite"),
        ({"a": {1: 2}}, "payload.a", "key 1"),
        ({"a": {None: 2}}, "payload.a", "key None"),
        ({"a": {(1, 2): 2}}, "payload.a", "key (1, 2)"),
        ({"a b": [Unknown()]}, 'payload["a b"][0]', "Unknown"),
        ({"a": "x\0y"}, "payload.a", "U+0000"),
        ({"a\0": 1}, 'payload["a\\u0000"]', "U+0000"),
        (["\ud83d"], "payload[0]", "surrogate"),
        ({"a": 10**5000}, "payload.a", "digits"),
        (LOOP, "payload", "contains itself"),
        ({"a": lambda: 1}, "payload.a", "function"),
        ({"a": iter([1])}, "payload.a", "iterator"),
        ({"a": deque([1])}, "payload.a", "deque"),
        ({"a": 1j}, "payload.a", "complex"),
        ({"a": Exception("x")}, "payload.a", "Exception"),
        ({"a": int}, "payload.a", "type"),
        ({"a": Page}, "payload.a", "type"),
        ({"a": Color}, "payload.a", "EnumType"),
        ({"a": Struct("a", MOMENT, Decimal(1), timedelta(0), [Unknown()])}, "payload.a", "msgspec"),  # type: ignore[list-item]
        ({"a": Half(1)}, "payload.a", "no value: rest"),
        ({"a": Model.model_construct(file=Unknown(), at=MOMENT)}, "payload.a", "pydantic"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_values_without_a_json_form_are_refused_with_their_path(value: Any, path: str, words: str) -> None:
    with pytest.raises(NotEncodable) as caught:
        encode(value)
    assert caught.value.path == path
    assert words in str(caught.value)
    assert str(caught.value).startswith(path)
    assert isinstance(caught.value, InvalidPayload)


@pytest.mark.parametrize(
    ("annotation", "text", "path"),
    [
        (Document, '{"file": "a", "pages": [{"number": 1}, {"number": "2"}]}', "payload.pages[1].number"),
        (Document, '{"pages": []}', "payload"),
        (Document, '{"file": "a", "at": "yesterday"}', "payload.at"),
        (Document, '{"file": "a", "parent": {"file": 1}}', "payload.parent.file"),
        (Document, "[]", "payload"),
        (float, "1" + "0" * 400, "payload"),
        (list[timedelta], "[NaN]", "payload[0]"),
        (Any, "[" * 200_000 + "]" * 200_000, "payload"),
        (int, "1.0", "payload"),
        (int, "true", "payload"),
        (float, "true", "payload"),
        (str, "null", "payload"),
        (bool, "0", "payload"),
        (None, "1", "payload"),
        (timedelta, '"PT1S"', "payload"),
        (timedelta, "1e300", "payload"),
        (Decimal, '"NaN"', "payload"),
        (Decimal, "true", "payload"),
        (UUID, '"x"', "payload"),
        (Color, '"blue"', "payload"),
        (Level, "2", "payload"),
        (Rights, "4", "payload"),
        (Rights, "true", "payload"),
        (dict[Label, int], '{"b": 1}', "payload.b"),
        (Literal["a"], '"b"', "payload"),
        (Literal[1], "true", "payload"),
        (tuple[int, str], "[1]", "payload"),
        (tuple[int, str], '["x", "y"]', "payload[0]"),
        (Point, "[]", "payload"),
        (set[Any], "[[1]]", "payload"),
        (dict[str, int], '{"a": "x"}', "payload.a"),
        (int | date, '"x"', "payload"),
        (int | None, '"x"', "payload"),
        (Options, '{"dpi": "x"}', "payload.dpi"),
        (Options, "{}", "payload"),
        (Asked, '{"pages": 1}', "payload"),
        (Strict, '{"n": -1}', "payload"),
        (Model, '{"file": "", "at": "2026-11-18T12:00:00Z"}', "payload.file"),
        (list[Model], '[{"file": "a"}]', "payload[0].at"),
        (Struct, '{"type": "s", "fileName": "a", "at": 1, "amount": "1", "every": "PT1S"}', "payload.at"),
        (
            Struct,
            '{"type": "s", "fileName": "a", "at": "2026-11-18T12:00:00Z", "amount": "1", "every": "PT1S",'
            ' "parts": [1, "x"]}',
            "payload.parts[1]",
        ),
        (Any, "{", "payload"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_path(annotation: Any, text: str, path: str) -> None:
    """HR28: with its own code."""
    with pytest.raises(NotDecodable) as caught:
        decoder(annotation)(text)
    assert caught.value.path == path
    assert caught.value.code == "payload_invalid"


def test_unknown_keys_are_ignored_so_producers_may_be_newer() -> None:
    assert decoder(Page)('{"number": 1, "added later": true}') == Page(1)


@dataclasses.dataclass
class Deep:
    pages: list[Page]
    parts: "dict[str, Deep | tuple[Unknown]] | None" = None


@pytest.mark.parametrize(
    "annotation",
    [Unknown, Deep, bytes, dict[int, str], complex, list[Unknown], Path, int | Unknown, deque[int]],
)
def test_an_annotation_that_cannot_be_read_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(ConfigurationError):
        decoder(annotation)


def test_a_field_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Deep\.parts: .*Unknown cannot be decoded"):
        decoder(list[Deep])


def test_equal_unions_are_read_in_their_own_order() -> None:
    assert int | float == float | int
    assert [type(decoder(each)("1")) for each in (int | float, float | int)] == [int, float]
    assert [type(decoder(list[each])("[1]")[0]) for each in (float | int, int | float)] == [float, int]  # type: ignore[valid-type]


def test_subclasses_of_the_json_types_are_written_as_their_base() -> None:
    class Name(str):
        def __str__(self) -> str:
            return "something else"

    value = {"a": Name("x"), "b": OrderedDict(c=1), "d": Level.LOW}
    assert encode(value) == '{"a":"x","b":{"c":1},"d":1}'


def test_equal_sets_have_equal_texts() -> None:
    """The fingerprint of an idempotency key uses the text."""
    words = [f"word {n}" for n in range(50)]
    assert encode(set(words)) == encode({*words[25:], *words[:25]})


class Tagged(pydantic.BaseModel):
    tags: frozenset[int]
    more: dict[str, list[set[int]]] = {}
    anything: Any = None
    inner: Optional["Tagged"] = None


class TaggedStruct(msgspec.Struct):
    tags: set[int]
    inner: list[frozenset[int]] = []


def test_equal_sets_of_models_have_equal_texts() -> None:
    one, other = [0, 8, 16], [16, 8, 0]
    assert list(set(one)) != list(set(other))

    def tagged(items: list[int]) -> Tagged:
        tags = frozenset(items)
        inner = Tagged(tags=tags, anything=set(items))
        return Tagged(tags=tags, more={"a": [set(items)]}, inner=inner)

    assert encode(tagged(one)) == encode(tagged(other))
    assert json.loads(encode(tagged(one)))["more"] == {"a": [[0, 16, 8]]}  # as texts
    assert decoder(Tagged)(encode(tagged(one))).more == {"a": [{0, 8, 16}]}
    structs = [TaggedStruct(set(each), [frozenset(each)]) for each in (one, other)]
    assert encode(structs[0]) == encode(structs[1])


def test_the_root_of_a_path_can_be_named() -> None:
    with pytest.raises(NotEncodable, match=r"^result\.a "):
        encode({"a": b""}, "result")


@pytest.mark.parametrize(
    "constraint", [pydantic.Field(gt=0), msgspec.Meta(gt=0)], ids=["pydantic", "msgspec"]
)
def test_constraints_in_an_annotation_are_kept(constraint: Any) -> None:
    read = decoder(Annotated[int, constraint])
    assert read("1") == 1
    with pytest.raises(NotDecodable):
        read("0")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Renamed(size=5), 'Renamed.size is written as "bytes", read as "size"'),
        (Outer(inside=[Renamed(size=5)]), 'Renamed.size is written as "bytes"'),
        (
            Received.model_validate({"userName": "bob"}),
            'Received.user is written as "user", read as "userName"',
        ),
        (Hidden(n=1), "payload.n is refused"),
        (Model.model_construct(file=1, at=MOMENT), "payload.file is refused"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_model_that_pydantic_would_not_read_back_is_refused(value: Any, words: str) -> None:
    """Where the field has a default, the handler would get that, and nobody would know."""
    task = fairq.App().task(kind="k")(lambda payload: None)
    task.handler.__annotations__["payload"] = type(value)
    with pytest.raises(NotEncodable, match=re.escape(words)):
        task.encode_payload(value)


def test_a_model_that_others_write_is_read() -> None:
    assert decoder(Received)('{"userName": "bob"}') == Received.model_validate({"userName": "bob"})
    assert encode_for(decoder(Received), {"userName": "bob"}) == '{"userName":"bob"}'


def test_utc_is_read_in_both_spellings() -> None:
    assert decoder(datetime)('"2026-11-18T12:00:00Z"') == datetime(2026, 11, 18, 12, tzinfo=UTC)
