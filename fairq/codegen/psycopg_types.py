"""How the `psycopg` template handles each PostgreSQL type: its annotation, and how it is sent and read.

Built-in types use psycopg's own adapters, in binary form. Types of the user's database have no fixed numbers,
so their values travel as text, and the generated `models.py` registers adapters under its own numbers. A type
that is not listed here is an error. Only JSON is `Any`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from psycopg import adapters

from fairq.codegen import names
from fairq.codegen.model import Catalog, Column, Composite, Domain, Enum, Range, TypeName, Untypable, words


@dataclass(frozen=True, slots=True)
class PyType:
    """One column or parameter. The prefix `models.` stands for the generated models module."""

    annotation: str  # of a value that is read
    accepts: str  # of a value that is sent
    number: str  # Python expression: the type's number in the driver, for text and COPY
    send: str = "{}"  # the value as a parameter; `{}` is its name
    wrapper: str = ""  # a driver class around the value, if that is enough
    read: str = "0"  # the type's number if a value arrives as text; 0: psycopg reads it
    binary: bool = True  # whether the result may be in binary form
    copy_value: str = "{}"
    copy_binary: bool = True
    is_json: bool = False

    def parameter(self, name: str, *, nullable: bool) -> str:
        """The expression that sends the value called `name`."""
        if self.wrapper:
            return f"driver.maybe({self.wrapper}, {name})" if nullable else f"{self.wrapper}({name})"
        return self.send.format(name)


_INTEGERS = {"int2": "Int2", "int4": "Int4", "int8": "Int8", "oid": "Oid"}
# By PostgreSQL's name. psycopg reads and writes all of these in binary form.
_NATIVE: dict[str, str] = {
    "bool": "bool",
    "numeric": "decimal.Decimal",
    **dict.fromkeys(("text", "varchar", "bpchar", "name"), "str"),
    "bytea": "bytes",
    "uuid": "uuid.UUID",
    "date": "datetime.date",
    **dict.fromkeys(("time", "timetz"), "datetime.time"),
    **dict.fromkeys(("timestamp", "timestamptz"), "datetime.datetime"),
    "interval": "datetime.timedelta",
    "inet": "driver.InetValue",
    "cidr": "driver.CidrValue",
}
_BOUNDS: dict[str, str] = {
    **dict.fromkeys(("int4", "int8"), "int"),
    "num": "decimal.Decimal",
    "date": "datetime.date",
    **dict.fromkeys(("ts", "tstz"), "datetime.datetime"),
}
# Types that are best read as text in Python. The extensions' types have no fixed numbers.
_AS_TEXT = words(
    """bit varbit money macaddr macaddr8 xml tsvector tsquery pg_lsn jsonpath char point line lseg path
    polygon circle regclass regtype regproc regprocedure regrole regnamespace regconfig xid xid8 cid tid
    txid_snapshot pg_snapshot refcursor"""
)
_EXTENSIONS_AS_TEXT = words("citext ltree lquery ltxtquery hstore vector semver cube")
_TEXT, _TEXT_ARRAY = 25, 1009
_NO_VALUE = words("void trigger event_trigger internal language_handler fdw_handler")


def python_type(column: Column, catalog: Catalog, *, raw_json: bool = False) -> PyType:
    """The type of a column or parameter. Raises `Untypable`."""
    return _resolve(column.type, column.dims, catalog, raw_json)


def _resolve(type_: TypeName, dims: int, catalog: Catalog, raw_json: bool) -> PyType:
    if not type_.name:
        raise Untypable("its type is not known", "write the type after it: `$1::text`, `expression::bigint`")
    if type_.schema in ("", "pg_catalog"):
        found = _built_in(type_.name, dims, raw_json)
        if found is not None:
            return found
    user_type = catalog.user_type(type_)
    if isinstance(user_type, Enum):
        return _enum(user_type, dims, catalog)
    if isinstance(user_type, Domain):
        return _domain(user_type, dims, catalog, raw_json)
    if isinstance(user_type, Composite):
        return _composite(user_type, dims, catalog)
    if isinstance(user_type, Range):
        return _range(user_type, dims, catalog, multirange=user_type.name.name != type_.name)
    if type_.name in _EXTENSIONS_AS_TEXT:
        if dims:
            return _array(_as_text(type_.name), dims, str(_TEXT_ARRAY), native=False)
        return _as_text(type_.name)
    raise _untypable(type_)


def _untypable(type_: TypeName) -> Untypable:
    if type_.name in _NO_VALUE:
        return Untypable(f"it is {type_.name}: there is no value", "use :exec")
    if type_.name == "record":
        hint = "name the columns: `select t.a, t.b from f() as t`"
        return Untypable("it is a record without columns", hint)
    if type_.name.startswith("any"):
        message = f"its type {type_.name} depends on its arguments"
        return Untypable(message, "write the type: `expression::bigint`")
    hint = "cast it to another type, for example `::text` or `::jsonb`"
    return Untypable(f"type {type_} has no Python type here", hint)


# ------------------------------------------------------------------------------------------------- built in


def _built_in(name: str, dims: int, raw_json: bool) -> PyType | None:
    if name in ("json", "jsonb"):
        return _json(name, dims, raw_json)
    plain = _plain(name)
    if plain is None:
        return None
    if not dims:
        return plain
    array = adapters.types[name].array_oid
    if name == "bpchar":
        # psycopg cannot write an array of it, but the server accepts an array of strings as text.
        return replace(_array(plain, dims, str(_TEXT_ARRAY), native=False), read="0", binary=True)
    if plain.binary:
        return _array(plain, dims, str(array), native=True)
    # psycopg also splits arrays of these, and leaves their elements as text.
    return replace(_array(plain, dims, str(_TEXT_ARRAY), native=False), read="0", binary=False)


def _plain(name: str) -> PyType | None:
    """A built-in type that is not JSON, on its own."""
    if name in _AS_TEXT:
        return _as_text(name)
    info = adapters.types.get(name)
    if info is None:
        return None
    if name in _INTEGERS:
        return PyType("int", "int", str(info.oid), wrapper=f"driver.{_INTEGERS[name]}")
    if name in ("float4", "float8"):
        return PyType("float", "float", str(info.oid), wrapper=f"driver.{name.capitalize()}")
    if name in _NATIVE:
        number = _TEXT if name == "bpchar" else info.oid
        return PyType(_NATIVE[name], _NATIVE[name], str(number))
    for ending, class_ in (("multirange", "Multirange"), ("range", "Range")):
        if name.endswith(ending) and name.removesuffix(ending) in _BOUNDS:
            annotation = f"driver.{class_}[{_BOUNDS[name.removesuffix(ending)]}]"
            return PyType(annotation, annotation, str(info.oid), send=f"driver.Typed({{}}, {info.oid})")
    return None


def _as_text(name: str) -> PyType:
    # citext is also text in binary form; others have a binary form of their own.
    return PyType("str", "str", str(_TEXT), binary=name == "citext", copy_binary=False)


def _json(name: str, dims: int, raw: bool) -> PyType:
    info = adapters.types[name]
    value = "str" if raw else "driver.JsonValue"
    wrapper = f"driver.{name}_text" if raw else f"driver.{name.capitalize()}"
    if not dims:
        copied = f"driver.maybe({wrapper}, {{}})" if raw else "{}"
        return PyType(value, value, str(info.oid), wrapper=wrapper, copy_value=copied, is_json=True)
    if dims > 1:
        raise Untypable("it is JSON in an array of arrays", "use one dimension: JSON has its own lists")
    # Wrapped one by one, because a list inside is a JSON list, not a dimension of the array.
    items = f"driver.each({wrapper}, {{}})"
    array = _array(PyType(value, value, str(info.oid)), dims, str(info.array_oid), native=True)
    send = f"driver.Typed({items}, {info.array_oid})"
    return replace(array, send=send, copy_value=items, is_json=True)


def _array(element: PyType, dims: int, number: str, *, native: bool) -> PyType:
    """`native`: psycopg knows the array by its number, so it travels in binary form."""
    annotation, accepts = element.annotation, element.accepts
    for _ in range(dims):
        annotation = f"list[{annotation}]"
    # psycopg finds the dimensions by the lists. A parameter's elements may be NULL; results are assumed to
    # have none.
    accepts = f"Sequence[{accepts} | None]" if dims == 1 else annotation
    return replace(
        element,
        annotation=annotation,
        accepts=accepts,
        number=number,
        wrapper="",
        send=f"driver.Typed({{}}, {number})" if native else f"driver.Text({{}}, {number})",
        read="0" if native else number,
        binary=native,
        copy_value="{}",
        copy_binary=native,
    )


# ----------------------------------------------------------------------------------------------- user types


def type_constant(class_name: str) -> str:
    """The constant in `models.py` for a user type's number."""
    return f"{names.method_name(class_name).upper()}_TYPE"


def class_of(type_: Enum | Composite | Range, catalog: Catalog) -> str:
    return plain_class(names.enum_class_name(type_.name, catalog))


def plain_class(name: str) -> str:
    """A class name without characters that Python refuses."""
    return names.identifier(re.sub(r"\W", "", name), "Model")


def _number(type_: Enum | Composite | Range, catalog: Catalog, offset: int = 0) -> str:
    constant = f"models.{type_constant(class_of(type_, catalog))}"
    return f"{constant} + {offset}" if offset else constant


def _enum(enum: Enum, dims: int, catalog: Catalog) -> PyType:
    annotation, number = f"models.{class_of(enum, catalog)}", _number(enum, catalog)
    # Both forms of an enum on the wire are its label.
    plain = PyType(annotation, annotation, number, read=number, copy_binary=False)
    return _array(plain, dims, _number(enum, catalog, 1), native=False) if dims else plain


def _domain(domain: Domain, dims: int, catalog: Catalog, raw_json: bool) -> PyType:
    if not dims:
        # The server describes a domain by its base type.
        return _resolve(domain.base, domain.dims, catalog, raw_json)
    if domain.dims:
        raise Untypable(f"it is an array of {domain.name}, which is an array itself", "cast it to jsonb")
    element = _resolve(domain.base, 0, catalog, raw_json=False)
    # An array of a domain has its own number, so it travels as text, as its base type.
    array = _resolve(domain.base, dims, catalog, raw_json=False)
    return _array(element, dims, array.number, native=False)


def _composite(composite: Composite, dims: int, catalog: Catalog) -> PyType:
    if not composite.fields:
        message = f"the fields of the composite type {composite.name} are not known"
        raise Untypable(message, "sqlc does not send them: use `fairq gen`")
    annotation = f"models.{class_of(composite, catalog)}"
    return _of_database(annotation, composite, dims, catalog, offset=0)


def _range(range_: Range, dims: int, catalog: Catalog, *, multirange: bool) -> PyType:
    bound = _resolve(range_.subtype, 0, catalog, raw_json=False)
    annotation = f"driver.{'Multirange' if multirange else 'Range'}[{bound.annotation}]"
    return _of_database(annotation, range_, dims, catalog, offset=2 if multirange else 0)


def _of_database(
    annotation: str, type_: Composite | Range, dims: int, catalog: Catalog, *, offset: int
) -> PyType:
    """A type of this database, which travels as text. The number of its arrays is the next one."""
    number = _number(type_, catalog, offset)
    send = f"driver.Text({{}}, {number})"
    plain = PyType(annotation, annotation, number, send=send, read=number, binary=False, copy_binary=False)
    return _array(plain, dims, _number(type_, catalog, offset + 1), native=False) if dims else plain


def user_types(column: Column, catalog: Catalog) -> Iterator[Enum | Composite | Range]:
    """The user types that a column needs, in order of dependency."""
    found = catalog.user_type(column.type)
    parts: tuple[Column, ...] = found.fields if isinstance(found, Composite) else ()
    if isinstance(found, Domain | Range):
        parts = (Column("", found.base if isinstance(found, Domain) else found.subtype),)
    for part in parts:
        yield from user_types(part, catalog)
    if isinstance(found, Enum | Composite | Range):
        yield found
