"""Payloads and results: Python values to JSON text, and back to the type that a handler's annotation names.

    encode({"file": "a.pdf", "at": datetime(...)})       -> '{"file":"a.pdf","at":"2026-…"}'
    decoder(Parse)('{"file": "a.pdf"}')                  -> Parse(file="a.pdf")

| Python                                    | JSON                                         |
|-------------------------------------------|----------------------------------------------|
| None, bool, int, float, str, list, dict   | the same; text keys, finite numbers only     |
| tuple, named tuple                        | array                                        |
| set, frozenset                            | array, sorted, so that equal sets are equal  |
| datetime, date, time                      | text, ISO 8601                               |
| timedelta                                 | number, total seconds                        |
| UUID, Decimal                             | text                                         |
| Enum                                      | its value                                    |
| dataclass, typed dict                     | object                                       |
| pydantic model, msgspec struct            | what that library writes, and reads          |

Everything else is refused, with the path to it. Decoding ignores unknown keys of an object, so a producer may
be newer than a worker. pydantic and msgspec are imported only for their own types.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
import re
import types
import typing
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property, lru_cache, partial
from importlib import import_module
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin
from uuid import UUID

from fairq.errors import ConfigurationError, NotDecodable, NotEncodable

__all__ = ["RESOLVABLE", "Decoder", "decoder", "encode", "encode_for", "fields_decoder", "simplify"]

# --- Writing ---------------------------------------------------------------------------------------


def _make_writer() -> Callable[[Any], str]:
    # Escapes keep the text pure ASCII, whatever the client encoding of the connection.
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without the C accelerator
        return json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False).encode
    # JSONEncoder.encode() makes one per call. Made once, a small object takes 0.4 µs instead of 1.9.
    quote = json.encoder.encode_basestring_ascii
    chunks = make(None, None, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(chunks(value, 0))


_write = _make_writer()


def encode(value: Any, root: str = "payload") -> str:
    """The JSON text of a value. Raises NotEncodable, which has the path: `payload.items[3].file`."""
    return _write(simplify(value, root))


def encode_for(reader: Decoder, value: Any) -> str:
    """The same, but also refuses what that decoder cannot read."""
    plain = simplify(value)
    if reader.lost is not None and plain != value:
        raise NotEncodable("payload", reader.lost, "Give the field one `alias` for both ways.")
    try:
        reader.plain(plain)
    except NotDecodable as exc:
        raise NotEncodable(exc.path, exc.reason) from exc
    return _write(plain)


def simplify(value: Any, root: str = "payload") -> Any:
    """The value as `json.loads` would return it: only None, bool, int, float, str, list and dict."""
    try:
        return _simplify(value)
    except _Refusal as refusal:
        raise NotEncodable(_path(root, refusal.steps), refusal.reason) from refusal.__cause__
    except RecursionError:
        raise NotEncodable(root, "contains itself, or is nested too deeply") from None


class _Refusal(Exception):
    """What is wrong, and the path to it, collected while the stack unwinds: valid values cost nothing."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.steps: list[str | int] = []


def _path(root: str, steps: Sequence[str | int]) -> str:
    """`payload.items[3]["odd key"]`, from the steps, last one first."""
    parts = [root]
    for step in reversed(steps):
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{step}" if step.isidentifier() else f"[{json.dumps(step)}]")
    return "".join(parts)


def _simplify(value: Any) -> Any:
    cls = type(value)
    if cls is str:
        return value if value.isascii() and "\0" not in value else _text(value)
    if cls is dict:
        return _object(value)
    if cls is list or cls is tuple:
        return _array(value)
    if cls is int:
        return _integer(value)
    if value is None or cls is bool:
        return value
    if cls is float:
        return _number(value)
    return _simplify_other(value)


def _object(value: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _Refusal(f"has the key {key!r:.60}; JSON has only text keys")
        try:
            name = key if type(key) is str and key.isascii() and "\0" not in key else _text(key)
            plain[name] = _simplify(item)
        except _Refusal as refusal:
            refusal.steps.append(str(key))
            raise
    return plain


def _array(values: Iterable[Any]) -> list[Any]:
    plain: list[Any] = []
    for item in values:
        try:
            plain.append(_simplify(item))
        except _Refusal as refusal:
            refusal.steps.append(len(plain))
            raise
    return plain


def _text(value: str) -> str:
    if "\0" in value:
        raise _Refusal("contains the character U+0000, which PostgreSQL cannot store")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Refusal("contains half of a surrogate pair, which is not Unicode text") from None
    # A subclass may override __str__.
    return str.__str__(value)


def _integer(value: int) -> int:
    # Python refuses to convert more digits than this; PostgreSQL reads 131072.
    if value.bit_length() > 13_000:
        raise _Refusal("is an integer of more than 3900 digits")
    return int(value)


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise _Refusal(f"is {value!r}; JSON has only finite numbers")
    return float(value)


def _simplify_other(value: Any) -> Any:
    cls = type(value)
    if isinstance(value, enum.Enum):
        return _simplify(value.value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return _seconds(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise _Refusal(f"is {value}; only finite numbers can be stored")
        return str(value)
    if hasattr(cls, "__pydantic_serializer__"):
        return _simplify(_by("pydantic", _of_pydantic, value))
    if _is_struct(cls):
        write = partial(import_module("msgspec").to_builtins, order="deterministic")
        return _simplify(_by("msgspec", write, value))
    if dataclasses.is_dataclass(cls):
        return _fields_to_object(value, dataclasses.fields(cls))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool | int):
        return _integer(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return _object(value)
    if isinstance(value, list | tuple):
        return _array(value)
    if isinstance(value, set | frozenset):
        return sorted(_array(value), key=_write)
    hint = " (encode it, for example as base64)" if isinstance(value, bytes | bytearray | memoryview) else ""
    raise _Refusal(f"is of type {_name(cls)}, which has no JSON form{hint}")


def _fields_to_object(value: Any, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    try:
        found = {field.name: getattr(value, field.name) for field in fields}
    except AttributeError as exc:  # init=False, and never set
        raise _Refusal(f"is a {_name(type(value))} with a field that has no value: {exc.name}") from exc
    return _object(found)


def _seconds(value: timedelta) -> int | float:
    seconds, rest = divmod(value, timedelta(seconds=1))
    return seconds if not rest else value.total_seconds()


def _of_pydantic(value: Any) -> Any:
    cls: Any = type(value)
    # round_trip: computed fields, for example, are left out, for nothing reads them.
    write = partial(cls.__pydantic_serializer__.to_python, value, by_alias=True, round_trip=True)
    plain = write(mode="json")
    return _sorted_sets(plain, write(mode="python")) if _has_sets(cls) else plain


@lru_cache(maxsize=1024)
def _has_sets(model: Any) -> bool:
    return bool(re.search(r"'type': '(?:set|frozenset|any)'", repr(model.__pydantic_core_schema__)))


def _sorted_sets(plain: Any, value: Any) -> Any:
    """The JSON of a value with its sets sorted: pydantic writes them in the order of this process."""
    if isinstance(value, set | frozenset) and isinstance(plain, list):
        return sorted(plain, key=lambda each: json.dumps(each, default=str))
    if isinstance(value, dict) and isinstance(plain, dict) and len(value) == len(plain):
        pairs = zip(plain.items(), value.values(), strict=True)
        return {name: _sorted_sets(item, inner) for (name, item), inner in pairs}
    if isinstance(value, list | tuple) and isinstance(plain, list) and len(value) == len(plain):
        return [_sorted_sets(item, inner) for item, inner in zip(plain, value, strict=True)]
    return plain


def _is_struct(cls: Any) -> bool:
    return hasattr(cls, "__struct_fields__") and hasattr(cls, "__struct_config__")


def _by(library: str, write: Callable[[Any], Any], value: Any) -> Any:
    try:
        return write(value)
    except Exception as exc:
        raise _Refusal(f"is a {_name(type(value))} that {library} cannot write: {exc}") from exc


def _name(cls: Any) -> str:
    if not isinstance(cls, type):
        return str(cls)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")


# --- Reading ---------------------------------------------------------------------------------------

Read = Callable[[Any], Any]

_raw_decode = json.JSONDecoder().raw_decode


def _loads(text: str | bytes) -> Any:
    """`json.loads`, in half the time for text without surrounding spaces, as the database sends it."""
    if type(text) is str and text[:1] not in " \t\n\r\ufeff":
        value, end = _raw_decode(text)
        if end == len(text):
            return value
    return json.loads(text)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes values of one annotation: JSON text when called, `plain` what `json.loads` returned."""

    annotation: Any
    _read: Read | None

    def __call__(self, text: str | bytes, root: str = "payload") -> Any:
        try:
            value = _loads(text)
        except ValueError as exc:
            raise NotDecodable(root, f"is not JSON: {exc}") from exc
        except RecursionError:
            raise NotDecodable(root, "is nested too deeply") from None
        return self.plain(value, root)

    def plain(self, value: Any, root: str = "payload") -> Any:
        if self._read is None:
            return value
        try:
            return self._read(value)
        except _Refusal as refusal:
            raise NotDecodable(_path(root, refusal.steps), refusal.reason) from refusal.__cause__
        except RecursionError:
            raise NotDecodable(root, "is nested too deeply") from None

    @cached_property
    def lost(self) -> str | None:
        """What would be written, but not read; None: nothing, as far as we know."""
        return next(_lost(self.annotation, set()), None)


def decoder(annotation: Any) -> Decoder:
    """The decoder of an annotation. Raises ConfigurationError if there is none, also for a part of it."""
    # Not cached by annotation: int | float and float | int are equal, and are read differently.
    return Decoder(annotation, _reader(annotation, []))


def fields_decoder(fields: Iterable[tuple[str, Any, bool]]) -> Decoder:
    """The decoder of an object, from the name and annotation of each field, and whether it is required."""
    known: _Known = []
    return Decoder(
        dict[str, Any],
        _fields_of([(name, _reader(annotation, known), required) for name, annotation, required in fields]),
    )


class _Later:
    """The reader of a type that is still being made: types may contain themselves."""

    read: Read | None = None

    def __call__(self, value: Any) -> Any:
        return value if self.read is None else self.read(value)


# The named types that a decoder has met, and their readers.
_Known = list[tuple[Any, _Later]]


def _once(annotation: Any, known: _Known, make: Callable[[], Read | None]) -> Read | None:
    """The reader of a named type, made once for a decoder."""
    shape = _shape(annotation)
    for each, later in known:
        if each == shape:
            return later
    later = _Later()
    known.append((shape, later))
    later.read = make()
    return later.read


def _shape(annotation: Any) -> Any:
    """Equal for annotations that are read alike. The members of a union have an order."""
    args = get_args(annotation)
    return (get_origin(annotation), *map(_shape, args)) if args else annotation


def _reader(annotation: Any, known: _Known) -> Read | None:
    """How to read a value of that type; None: take it unchanged."""
    if annotation in (Any, object) or isinstance(annotation, TypeVar):
        return None
    if annotation is None:
        annotation = type(None)
    if isinstance(annotation, NewType):
        return _reader(annotation.__supertype__, known)
    origin, args = get_origin(annotation), get_args(annotation)
    alias = origin or annotation
    if type(alias).__name__ == "TypeAliasType":
        meant = _with_types(alias.__value__, dict(zip(alias.__type_params__, args, strict=False)))
        return _once(annotation, known, lambda: _reader(meant, known))
    if origin in _QUALIFIERS:
        return _reader(args[0], known)
    # Constraints in an annotation are checked by the library they come from.
    if origin is Annotated:
        makers = {type(each).__module__.split(".", 1)[0] for each in args[1:]}
        if makers & {"pydantic", "annotated_types"}:
            return _pydantic_reader(annotation)
        return _msgspec_reader(annotation) if "msgspec" in makers else _reader(args[0], known)
    if origin is Union or origin is types.UnionType:
        return _union(args, known)
    if origin is Literal:
        return _literal(args)
    if isinstance(annotation, type) and annotation in _SCALARS:
        return _SCALARS[annotation]
    cls = origin if isinstance(origin, type) else annotation
    if not isinstance(cls, type):
        raise ConfigurationError(f"{annotation!r} cannot be decoded from JSON", _HINT)
    if hasattr(cls, "__pydantic_validator__"):
        return _pydantic_reader(annotation)
    if _is_struct(cls):
        return _msgspec_reader(annotation)
    return _container(annotation, cls, args, known) or _record(annotation, cls, known)


# What an annotation of a field may say besides its type. ReadOnly came with Python 3.13.
_QUALIFIERS = (typing.Required, typing.NotRequired, typing.Final, getattr(typing, "ReadOnly", typing.Final))
_HINT = (
    "Annotate with JSON types, dataclasses, typed dicts, pydantic models, msgspec structs, datetime, date, "
    "time, timedelta, UUID, Decimal, Enum, or lists, tuples, sets, dicts and unions of them."
)


def _container(annotation: Any, cls: type, args: tuple[Any, ...], known: _Known) -> Read | None:
    if issubclass(cls, tuple) and not hasattr(cls, "_fields"):
        if len(args) == 2 and args[1] is Ellipsis:
            return _list_of(_reader(args[0], known), tuple)
        if any(getattr(each, "__unpacked__", False) or get_origin(each) is typing.Unpack for each in args):
            raise ConfigurationError(f"{annotation!r} cannot be decoded: name each item's type", _HINT)
        return _tuple_of([_reader(each, known) for each in args]) if args else _list_of(None, tuple)
    if cls in _LISTS:
        return _list_of(_reader(args[0], known) if args else None, _LISTS[cls])
    if cls in (dict, Mapping, MutableMapping):
        key, item = args or (Any, Any)
        if not _is_text(key):
            raise ConfigurationError(f"{annotation!r} cannot be decoded: JSON has only text keys", _HINT)
        return _dict_of(_reader(key, known) if key is not str else None, _reader(item, known))
    return None


def _is_text(key: Any) -> bool:
    """Whether the keys of a dict with this annotation are texts in Python, too."""
    if isinstance(key, NewType):
        return _is_text(key.__supertype__)
    if get_origin(key) is Literal:
        return all(isinstance(each, str) for each in get_args(key))
    is_enum = isinstance(key, type) and issubclass(key, enum.Enum) and issubclass(key, str)
    return key in (str, Any) or isinstance(key, TypeVar) or is_enum


_LISTS: dict[Any, Callable[[list[Any]], Any] | None] = {
    **dict.fromkeys((list, Sequence, MutableSequence, Collection, Iterable)),
    **dict.fromkeys((set, AbstractSet), set),
    frozenset: frozenset,
}


def _record(annotation: Any, cls: type, known: _Known) -> Read | None:
    if issubclass(cls, enum.Enum):
        return _enum(cls)
    # Also those of typing_extensions, which typing.is_typeddict does not know.
    if issubclass(cls, dict) and hasattr(cls, "__required_keys__"):
        return _once(annotation, known, lambda: _typed_dict(annotation, cls, known))
    if issubclass(cls, tuple):
        return _once(annotation, known, lambda: _named_tuple(annotation, cls, known))
    if dataclasses.is_dataclass(cls):
        return _once(annotation, known, lambda: _dataclass(annotation, cls, known))
    raise ConfigurationError(f"{_name(annotation)} cannot be decoded from JSON", _HINT)


# Each reader says what it expected and what it got. The path is added on the way out.


def _wanted(what: str, value: Any) -> _Refusal:
    known: dict[type, str] = {dict: "an object", list: "an array"}
    shown = known.get(type(value)) or json.dumps(value, ensure_ascii=False)
    return _Refusal(f"should be {what}, not {shown[:80]}")


def _scalar(what: str, kinds: type | tuple[type, ...], make: Callable[[Any], Any] | None = None) -> Read:
    """Reads values of these kinds. A bool is accepted only where bool is the kind."""

    def read(value: Any) -> Any:
        if not isinstance(value, kinds) or isinstance(value, bool) != (kinds is bool):
            raise _wanted(what, value)
        try:
            return value if make is None else make(value)
        except (ArithmeticError, ValueError):
            raise _wanted(what, value) from None

    return read


def _decimal(value: float | str) -> Decimal:
    found = Decimal(value if isinstance(value, str) else repr(value))
    if not found.is_finite():
        raise ValueError
    return found


# Many encoders write 1.0 as 1.
_NUMBER = (int, float)
_SCALARS: dict[type, Read] = {
    str: _scalar("a text", str),
    bool: _scalar("true or false", bool),
    int: _scalar("a whole number", int),
    float: _scalar("a number", _NUMBER, float),
    type(None): _scalar("null", type(None)),
    datetime: _scalar("a date and time in ISO 8601", str, datetime.fromisoformat),
    date: _scalar("a date in ISO 8601", str, date.fromisoformat),
    time: _scalar("a time in ISO 8601", str, time.fromisoformat),
    timedelta: _scalar("a number of seconds", _NUMBER, lambda value: timedelta(seconds=value)),
    UUID: _scalar("a UUID", str, UUID),
    Decimal: _scalar("a decimal number", (*_NUMBER, str), _decimal),
}


def _item(step: str | int, read: Read | None, value: Any) -> Any:
    if read is None:
        return value
    try:
        return read(value)
    except _Refusal as refusal:
        refusal.steps.append(step)
        raise


def _list_of(read: Read | None, make: Callable[[list[Any]], Any] | None) -> Read:
    def read_list(value: Any) -> Any:
        if not isinstance(value, list):
            raise _wanted("an array", value)
        if read is not None:
            value = [_item(step, read, item) for step, item in enumerate(value)]
        try:
            return value if make is None else make(value)
        except TypeError:  # a set of what cannot be hashed
            raise _Refusal("holds arrays or objects, which cannot be in a set") from None

    return read_list


def _tuple_of(
    reads: Sequence[Read | None], required: int | None = None, make: Callable[..., Any] = tuple
) -> Read:
    least = len(reads) if required is None else required

    def read_tuple(value: Any) -> Any:
        if not isinstance(value, list) or not least <= len(value) <= len(reads):
            raise _wanted(f"an array of {len(reads)}", value)
        pairs = zip(reads, value, strict=False)
        return make(_item(step, read, item) for step, (read, item) in enumerate(pairs))

    return read_tuple


def _dict_of(read_key: Read | None, read: Read | None) -> Read:
    def read_dict(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wanted("an object", value)
        if read is not None:
            value = {key: _item(key, read, item) for key, item in value.items()}
        if read_key is not None:
            value = {_item(key, read_key, key): item for key, item in value.items()}
        return value  # type: ignore[no-any-return]

    return read_dict


def _union(annotations: tuple[Any, ...], known: _Known) -> Read:
    """Reads the first member that fits, in the order of the annotation."""
    readers = [_reader(each, known) for each in annotations]

    def read_union(value: Any) -> Any:
        if value is None and type(None) in annotations:
            return None
        refusals: list[_Refusal] = []
        for annotation, read in zip(annotations, readers, strict=True):
            if annotation is type(None):
                continue
            if read is None:
                return value
            try:
                return read(value)
            except _Refusal as refusal:
                refusals.append(refusal)
        if len(refusals) == 1:  # Optional[…]: the reason of the only other member
            raise refusals[0]
        raise _wanted(" or ".join(_name(each) for each in annotations), value)

    return read_union


def _literal(values: tuple[Any, ...]) -> Read:
    def read_literal(value: Any) -> Any:
        for each in values:
            plain = each.value if isinstance(each, enum.Enum) else each
            if plain == value and type(plain) is type(value):
                return each
        raise _wanted(" or ".join(json.dumps(each, default=str) for each in values), value)

    return read_literal


def _enum(cls: type[enum.Enum]) -> Read:
    by_plain: dict[str, enum.Enum] = {}
    is_flag = issubclass(cls, enum.Flag)
    for member in cls:
        try:
            by_plain[_write(_simplify(member.value))] = member
        except _Refusal as refusal:
            raise ConfigurationError(f"{_name(cls)}.{member.name} {refusal.reason}") from None

    def read_enum(value: Any) -> enum.Enum:
        found = by_plain.get(_write(value))
        if found is None and is_flag and type(value) is int:
            with suppress(ValueError):  # several flags, or none
                return cls(value)
        if found is None:
            raise _wanted(f"one of {', '.join(by_plain)}", value)
        return found

    return read_enum


# For each field: its name, how to read it, whether it is required.
_Fields = Sequence[tuple[str, Read | None, bool]]


def _fields_of(fields: _Fields) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wanted("an object", value)
        found: dict[str, Any] = {}
        for name, reader, required in fields:
            if name in value:
                found[name] = _item(name, reader, value[name])
            elif required:
                raise _Refusal(f'lacks "{name}"')
        return found

    return read


def _field(cls: type, name: str, hint: Any, known: _Known) -> Read | None:
    try:
        return _reader(hint, known)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{_name(cls)}.{name}: {exc}", exc.hint) from exc


def _dataclass(annotation: Any, cls: type, known: _Known) -> Read:
    hints, missing = _hints(annotation, cls), dataclasses.MISSING
    fields = _fields_of(
        [
            (
                each.name,
                _field(cls, each.name, hints[each.name], known),
                each.default is missing and each.default_factory is missing,
            )
            for each in dataclasses.fields(cls)
            if each.init
        ]
    )

    def read_dataclass(value: Any) -> Any:
        given = fields(value)
        try:
            return cls(**given)
        except (TypeError, ValueError) as exc:  # from the class's own __post_init__
            raise _Refusal(f"is refused by {_name(cls)}: {exc}") from exc

    return read_dataclass


def _typed_dict(annotation: Any, cls: Any, known: _Known) -> Read:
    return _fields_of(
        [
            (name, _field(cls, name, hint, known), _is_required(cls, name, hint))
            for name, hint in _hints(annotation, cls).items()
        ]
    )


def _is_required(cls: Any, name: str, hint: Any) -> bool:
    while (origin := get_origin(hint)) in (*_QUALIFIERS, Annotated):
        # The class itself does not see these in annotations that are text.
        if origin in (typing.Required, typing.NotRequired):
            return origin is typing.Required
        hint = get_args(hint)[0]
    return name in cls.__required_keys__


def _named_tuple(annotation: Any, cls: Any, known: _Known) -> Read:
    hints = _hints(annotation, cls)
    reads = [_field(cls, name, hints.get(name, Any), known) for name in cls._fields]
    return _tuple_of(reads, len(reads) - len(cls._field_defaults), lambda items: cls(*items))


RESOLVABLE = (
    "Name what is at the top of its module, and imported when the program runs: not under TYPE_CHECKING."
)

# The annotations of a class. Those of a generic class name its parameters: `Page[date]` has `items: list[T]`.


def _hints(annotation: Any, cls: Any) -> dict[str, Any]:
    try:
        return _hints_of(annotation, cls)
    except Exception as exc:  # annotations are code: any error is possible
        text = f"the annotations of {_name(cls)} cannot be resolved: {exc}"
        raise ConfigurationError(text, RESOLVABLE) from exc


def _hints_of(annotation: Any, cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    types = dict(zip(getattr(cls, "__parameters__", ()), get_args(annotation), strict=False))
    found = {name: _with_types(hint, types) for name, hint in hints.items()}
    for base in vars(cls).get("__orig_bases__", ()):
        origin = get_origin(base)
        if isinstance(origin, type) and origin not in (typing.Generic, typing.Protocol):
            # Its own parameters may have the same names as those of this class.
            inherited = _hints_of(_with_types(base, types), origin)
            # A typed dict has the annotations of its bases, too.
            own = () if hasattr(cls, "__required_keys__") else inspect.get_annotations(cls)
            found |= {name: hint for name, hint in inherited.items() if name not in own}
    return found


def _with_types(hint: Any, types: Mapping[Any, Any]) -> Any:
    """The annotation, with these in the place of type parameters; what is not known may be anything."""
    if isinstance(hint, TypeVar):
        return types.get(hint, Any)
    parameters = getattr(hint, "__parameters__", ())
    if not parameters or isinstance(hint, type):
        return hint
    return hint[tuple(types.get(each, Any) for each in parameters)]


# --- Libraries that read their own types -------------------------------------------------------------


def _pydantic_reader(annotation: Any) -> Read:
    import pydantic

    adapter: Any = pydantic.TypeAdapter(annotation)

    def read(value: Any) -> Any:
        try:
            # As JSON: there even strict models read a datetime from text.
            return adapter.validate_json(json.dumps(value))
        except pydantic.ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            refusal = _Refusal(f"is refused by {_name(annotation)}: {first['msg']}")
            refusal.steps = list(reversed(first["loc"]))
            raise refusal from exc

    return read


def _lost(annotation: Any, seen: set[Any]) -> Iterator[str]:
    """Fields of pydantic models that are written under a name under which they are not read. With a default
    they would silently have that. A model that somebody else writes may be like that.
    """
    for each in get_args(annotation):
        yield from _lost(each, seen)
    if not isinstance(annotation, type) or annotation in seen:
        return
    seen.add(annotation)
    said: Any = annotation
    has_own_way = getattr(getattr(said, "__pydantic_decorators__", None), "model_serializers", None)
    fields = getattr(said, "__pydantic_fields__", None) or getattr(said, "model_fields", {})
    for name, field in ({} if has_own_way else fields).items():
        yield from _lost(field.annotation, seen)
        written, read = field.serialization_alias or name, _names_read(said, name, field.validation_alias)
        if not field.exclude and read and written not in read:
            yield f'cannot be read back: {_name(said)}.{name} is written as "{written}", read as "{read[0]}"'


def _names_read(model: Any, name: str, alias: Any) -> list[str]:
    """The names under which a field is read; none: it is told otherwise."""
    config = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", None) or {}
    before = [each.info.mode for each in model.__pydantic_decorators__.model_validators.values()]
    if {*before} & {"before", "wrap"}:
        return []
    choices = getattr(alias, "choices", [name if alias is None else alias])
    found = [each for each in choices if isinstance(each, str)]
    return [*found, name] if config.get("populate_by_name") or config.get("validate_by_name") else found


def _msgspec_reader(annotation: Any) -> Read:
    import msgspec

    def read(value: Any) -> Any:
        try:
            return msgspec.convert(value, annotation)
        except msgspec.ValidationError as exc:
            message, _, place = str(exc).partition(" - at `$")
            refusal = _Refusal(f"is refused by {_name(annotation)}: {message}")
            refusal.steps = _steps(place.rstrip("`"))
            raise refusal from exc

    return read


def _steps(place: str) -> list[str | int]:
    """`.items[3].file` as steps, last one first."""
    parts = filter(None, place.replace("[", ".[").split("."))
    return [int(part[1:-1]) if re.fullmatch(r"\[\d+\]", part) else part for part in parts][::-1]
