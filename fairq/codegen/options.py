"""The `options` of a `codegen` entry in sqlc.yaml, read and checked. Both front ends use it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from fairq.codegen.model import GenerationError, Options, Template

_FLAGS = frozenset(field.name for field in dataclasses.fields(Options) if field.type == "bool")


def parse_options(given: Mapping[str, Any], path: str = "") -> Options:
    """Options from their JSON or YAML form. A misspelled name or a value of the wrong type is an error."""
    known = {field.name for field in dataclasses.fields(Options)}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known options: {', '.join(sorted(known))}"
            raise GenerationError(f"unknown option {name!r}", hint=hint, path=path)

    # A key without a value is as good as absent: YAML writes `package:` as null.
    options = Options(
        **{name: _value(name, value, path) for name, value in given.items() if value is not None}
    )
    if not options.package:
        raise GenerationError(
            "option 'package' is missing",
            hint="name the Python package the generated modules import `models` from",
            path=path,
        )
    if options.query_parameter_limit is not None and options.query_parameter_limit < 0:
        raise GenerationError(
            "invalid query parameter limit", hint="query_parameter_limit must be 0 or more", path=path
        )
    return options


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(part, str) for pair in value.items() for part in pair
    )


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {
    **dict.fromkeys(_FLAGS, ("true or false", lambda value: isinstance(value, bool), bool)),
    "query_parameter_limit": ("a whole number", lambda value: type(value) is int, int),
    "inflection_exclude_table_names": ("a list of names", _is_list, tuple),
    "not_null_functions": ("a list of names", _is_list, tuple),
    "template": (" or ".join(Template), lambda value: value in list(Template), Template),
    "types": ("a map of PostgreSQL types to Python types", _is_map, dict),
}


def _value(name: str, value: Any, path: str) -> Any:
    text = ("text", lambda value: isinstance(value, str), str)
    expected, fits, make = _EXPECTED.get(name, text)
    if not fits(value):
        raise GenerationError(f"option {name!r} must be {expected}, not {value!r}", path=path)
    return make(value)
