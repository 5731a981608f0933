"""How names in SQL become names in Python, by the same rules in both templates."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

from fairq.codegen import inflection
from fairq.codegen.model import Catalog, Name, Options

_WORD_START = re.compile(r"(.)([A-Z][a-z]+)")
_LOWER_THEN_UPPER = re.compile(r"([a-z0-9])([A-Z])")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


def class_name(name: str) -> str:
    """`block_state` to `BlockState`; letters after the first of a part stay as they are."""
    return "".join(_capitalise_words(part) for part in name.split("_"))


def _capitalise_words(text: str) -> str:
    # A quoted name may hold blanks and dots: each word in it starts with a capital.
    letters: list[str] = []
    inside = False
    for char in text:
        titled = char.title()
        letters.append(titled if not inside and len(titled) == 1 else char)
        inside = char.isalnum() or char == "_"
    return "".join(letters)


def method_name(name: str) -> str:
    """`PopTasks` to `pop_tasks`, `GetHTTPCode` to `get_http_code`."""
    spaced = _WORD_START.sub(r"\1_\2", name)
    return _LOWER_THEN_UPPER.sub(r"\1_\2", spaced).lower()


def member_name(value: str) -> str:
    """The name of an enum's member: `in-progress` to `IN_PROGRESS`. Empty when no letter or digit is left."""
    joined = re.sub(r"[-:/]", "_", value)
    return _NOT_IN_NAMES.sub("", joined).upper()


def qualified(name: Name, catalog: Catalog) -> str:
    """The bare name in the default schema, else `<schema>_<name>`."""
    return name.name if name.schema in ("", catalog.default_schema) else f"{name.schema}_{name.name}"


def enum_class_name(name: Name, catalog: Catalog) -> str:
    return class_name(qualified(name, catalog))


def model_class_name(name: Name, catalog: Catalog, options: Options) -> str:
    """The class of a table or view: singular, with its schema in front unless that is the default one."""
    table = qualified(name, catalog)
    if not options.emit_exact_table_names:
        table = inflection.singular(table, options.inflection_exclude_table_names)
    return class_name(table)


def identifier(name: str, fallback: str) -> str:
    """A name that Python accepts: odd signs become `_`, a keyword gets one behind, a digit one in front."""
    # Python reads identifiers in this form, so two names that differ in it only would be one.
    normal = unicodedata.normalize("NFKC", name)
    cleaned = "".join(char if f"_{char}".isidentifier() else "_" for char in normal)
    if not cleaned.strip("_") and normal.strip("_"):
        return fallback
    cleaned = cleaned or fallback
    if not cleaned.isidentifier():
        cleaned = "_" + cleaned
    return cleaned + "_" if keyword.iskeyword(cleaned) else cleaned


def distinct(names: Iterable[str]) -> list[str]:
    """Repeated names numbered from the second on: `id`, `id_2`, `id_3`; never onto a name that is taken."""
    given = list(names)
    taken = set(given)
    seen: Counter[str] = Counter()
    result: list[str] = []
    for name in given:
        seen[name] += 1
        if seen[name] > 1:
            while (numbered := f"{name}_{seen[name]}") in taken:
                seen[name] += 1
            taken.add(numbered)
            name = numbered
        result.append(name)
    return result
