"""Which Python type the `sqlalchemy` template writes for a column.

With `strict`, only `_REFERENCE` decides: sqlc-gen-python 1.3.0's table, keyed by sqlc's text; anything else
is `Any`. Otherwise `_TYPES` decides, keyed by PostgreSQL's name. Both agree on the types in `_REFERENCE`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fairq.codegen import names
from fairq.codegen.model import Catalog, Column, Composite, Domain, Enum, Options, Range, TypeName, Untypable


def _table(text: str) -> dict[str, str]:
    """`Python: name, name, …` line by line, as name to Python."""
    lines = (line.partition(": ") for line in text.strip().splitlines())
    return {name: python.strip() for python, _, spelled in lines for name in spelled.split(", ")}


_TYPES = _table(
    """
    int: int2, int4, int8, oid
    float: float4, float8
    decimal.Decimal: numeric, money
    bool: bool
    Any: json, jsonb
    memoryview: bytea
    datetime.date: date
    datetime.time: time, timetz
    datetime.datetime: timestamp, timestamptz
    datetime.timedelta: interval
    str: text, varchar, bpchar, char, name, xml, inet, cidr, macaddr, macaddr8, tsvector, tsquery
    str: regclass, regtype, regproc, regprocedure, regrole, regnamespace
    uuid.UUID: uuid
    None: void
    """
)

# Types of well-known extensions, whatever schema they were installed in.
_EXTENSION_TYPES = _table("str: citext, ltree, lquery, ltxtquery")

_REFERENCE = _table(
    """
    int: serial, serial4, pg_catalog.serial4, bigserial, serial8, pg_catalog.serial8
    int: smallserial, serial2, pg_catalog.serial2, integer, int, int4, pg_catalog.int4
    int: bigint, int8, pg_catalog.int8, smallint, int2, pg_catalog.int2
    float: float, double precision, float8, pg_catalog.float8, real, float4, pg_catalog.float4
    decimal.Decimal: numeric, pg_catalog.numeric, money
    bool: boolean, bool, pg_catalog.bool
    Any: json, jsonb
    memoryview: bytea, blob, pg_catalog.bytea
    datetime.date: date
    datetime.time: pg_catalog.time, pg_catalog.timetz
    datetime.datetime: pg_catalog.timestamp, pg_catalog.timestamptz, timestamptz
    datetime.timedelta: interval, pg_catalog.interval
    str: text, pg_catalog.varchar, pg_catalog.bpchar, string, citext
    str: inet, cidr, macaddr, macaddr8, ltree, lquery, ltxtquery
    uuid.UUID: uuid
    """
)


@dataclass(frozen=True, slots=True)
class PyType:
    inner: str  # as code in a query module: `int`, `datetime.date`, `models.Status`
    is_array: bool = False
    is_null: bool = False

    @property
    def annotation(self) -> str:
        text = f"List[{self.inner}]" if self.is_array else self.inner
        return f"Optional[{text}]" if self.is_null else text


def python_type(column: Column, catalog: Catalog, options: Options) -> PyType:
    """The type to write for a column. Raises `Untypable`, but not with `strict`."""
    strict = options.strict
    found = _reference_type(column.type, catalog) if strict else _real_type(column.type, catalog, options)
    return PyType(found, column.dims > 0, not column.not_null)


def _reference_type(type_: TypeName, catalog: Catalog) -> str:
    # `fairq gen` has only PostgreSQL's name, which the reference spells in one of these two ways.
    spellings = (type_.spelling,) if type_.spelling else (type_.name, f"pg_catalog.{type_.name}")
    for text in spellings:
        if text in _REFERENCE:
            return _REFERENCE[text]
    # The reference compares the text with bare names, so it does not find an enum written with its schema.
    written = type_.spelling or str(_in_default(type_, catalog))
    for each in catalog.types:
        if isinstance(each, Enum) and written == each.name.name:
            return f"models.{names.enum_class_name(each.name, catalog)}"
    return "Any"


def _in_default(type_: TypeName, catalog: Catalog) -> TypeName:
    return TypeName("", type_.name) if type_.schema == catalog.default_schema else type_


def _real_type(type_: TypeName, catalog: Catalog, options: Options) -> str:
    override = options.types.get(str(type_)) or options.types.get(str(_in_default(type_, catalog)))
    if override:
        return override
    if not type_.name:
        said = f" (sqlc says {type_.spelling!r})" if type_.spelling else ""
        raise Untypable(
            f"has no type that is known{said}",
            "cast it in the SQL, for example `max(t.run_at)::timestamptz as run_at`",
        )
    if type_.name == "record":
        raise Untypable(
            "is a whole record",
            "name the columns: `select r.id, r.state from f($1) as r`, or let the function return "
            "`setof` a table; sqlc turns `select *` from a function into one record",
        )
    if type_.schema in ("", "pg_catalog") and type_.name in _TYPES:
        inner = _TYPES[type_.name]
        # Pydantic has no schema for memoryview, so defining the class would fail.
        return "bytes" if inner == "memoryview" and options.emit_pydantic_models else inner
    match catalog.user_type(type_):
        case Enum() as enum:
            return f"models.{names.identifier(names.enum_class_name(enum.name, catalog), 'Enum')}"
        case Domain() as domain if not domain.dims:
            return _real_type(domain.base, catalog, options)
        case Domain() | Composite() | Range() as other:
            kind = type(other).__name__.lower()
            message = f"has the {kind} type {type_}, which drivers read in different ways"
            raise Untypable(message, _hint_for(type_))
        case None:
            if type_.name in _EXTENSION_TYPES:
                return _EXTENSION_TYPES[type_.name]
            message = f"has type {type_}, for which this template has no Python type"
            raise Untypable(message, _hint_for(type_))


def _hint_for(type_: TypeName) -> str:
    return (
        f"cast it in the SQL (to text, or to the base type of a domain), or say what your driver returns: "
        f"option `types: {{{type_}: str}}`"
    )
