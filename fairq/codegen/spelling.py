"""From sqlc's text for a type to PostgreSQL's own name for it.

sqlc passes on what it read: the parser's name (`pg_catalog.int4`), the user's (`timestamptz`, `status`), or
that of its table of functions (`timestamp with time zone`, `text[]`). Of a view's column it joins schema
and name with a dot.
"""

from __future__ import annotations

from fairq.codegen.model import UNKNOWN_TYPE, Catalog, TypeName, words

_SYNONYMS = {
    spelled: name
    for name, *spellings in (
        ("int2", "smallint", "smallserial", "serial2"),
        ("int4", "int", "integer", "serial", "serial4"),
        ("int8", "bigint", "bigserial", "serial8"),
        ("float4", "real"),
        ("float8", "float", "double", "double precision"),
        ("numeric", "decimal"),
        ("bool", "boolean"),
        ("text", "string"),
        ("bytea", "blob"),
        ("varchar", "character varying"),
        ("bpchar", "character"),
        ("varbit", "bit varying"),
        ("time", "time without time zone"),
        ("timetz", "time with time zone"),
        ("timestamp", "timestamp without time zone"),
        ("timestamptz", "timestamp with time zone"),
    )
    for spelled in spellings
}

# The types of pg_catalog that people meet; any other bare name is a type of the user or of an extension.
_BUILT_IN = frozenset(_SYNONYMS.values()) | words(
    """oid xid xid8 cid tid name char text json jsonb uuid date interval money xml bit inet cidr macaddr
    macaddr8 tsvector tsquery pg_lsn pg_snapshot point line lseg box path polygon circle record void
    int4range int8range numrange tsrange tstzrange daterange
    int4multirange int8multirange nummultirange tsmultirange tstzmultirange datemultirange
    regclass regtype regproc regprocedure regoper regoperator regrole regnamespace regconfig regdictionary
    regcollation"""
)

# What sqlc says when it does not know: the arguments and results of polymorphic functions, and expressions.
_UNKNOWN = words(
    """any unknown anyelement anyarray anynonarray anyenum anyrange anymultirange anycompatible
    anycompatiblearray anycompatiblenonarray anycompatiblerange anycompatiblemultirange"""
)


def parse_type(schema: str, name: str, catalog: Catalog | None = None) -> tuple[TypeName, int]:
    """The type and the array dimensions its text itself names. `catalog` gives user types their schema."""
    spelling = f"{schema}.{name}" if schema else name
    text, dims = spelling, 0
    while text.endswith("[]"):
        text, dims = text.removesuffix("[]"), dims + 1
    in_schema, _, bare = text.rpartition(".")
    if in_schema in ("", "pg_catalog"):
        if not dims and bare.startswith("_") and _built_in(bare[1:]):
            bare, dims = bare[1:], 1
        if bare in _UNKNOWN or not bare:
            return TypeName(UNKNOWN_TYPE.schema, UNKNOWN_TYPE.name, spelling), dims
        if built_in := _built_in(bare):
            return TypeName("pg_catalog", built_in, spelling), dims
    type_ = TypeName(in_schema, bare, spelling)
    if not in_schema and catalog and (user_type := catalog.user_type(type_)):
        type_ = TypeName(user_type.name.schema, bare, spelling)
    return type_, dims


def _built_in(bare: str) -> str:
    name = _SYNONYMS.get(bare, bare)
    return name if name in _BUILT_IN else ""
