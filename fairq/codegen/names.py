"""How names in SQL become names in Python; both templates use the same rules."""

from __future__ import annotations

import functools
import keyword
import re
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable

from fairq.codegen.model import Catalog, GenerationError, Name, Options, words

_WORD_START = re.compile(r"(.)([A-Z][a-z]+)")
_LOWER_THEN_UPPER = re.compile(r"([a-z0-9])([A-Z])")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


def class_name(name: str) -> str:
    """`block_state` to `BlockState`; the other letters of each part stay unchanged."""
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
    """The name of an enum's member: `in-progress` to `IN_PROGRESS`. Empty if no letter or digit is left."""
    joined = re.sub(r"[-:/]", "_", value)
    return _NOT_IN_NAMES.sub("", joined).upper()


def qualified(name: Name, catalog: Catalog) -> str:
    """The bare name in the default schema, else `<schema>_<name>`."""
    return name.name if name.schema in ("", catalog.default_schema) else f"{name.schema}_{name.name}"


def enum_class_name(name: Name, catalog: Catalog) -> str:
    return class_name(qualified(name, catalog))


def model_class_name(name: Name, catalog: Catalog, options: Options) -> str:
    """The class of a table or view: singular, prefixed with its schema unless that is the default one."""
    table = qualified(name, catalog)
    if not options.emit_exact_table_names:
        table = singular(table, options.inflection_exclude_table_names)
    return class_name(table)


def identifier(name: str, fallback: str) -> str:
    """A name that Python accepts: odd characters become `_`, `_` follows a keyword and precedes a digit."""
    # Python normalises identifiers to this form, so names that differ only before it would be equal.
    normal = unicodedata.normalize("NFKC", name)
    cleaned = "".join(char if f"_{char}".isidentifier() else "_" for char in normal)
    if not cleaned.strip("_") and normal.strip("_"):
        return fallback
    cleaned = cleaned or fallback
    if not cleaned.isidentifier():
        cleaned = "_" + cleaned
    return cleaned + "_" if keyword.iskeyword(cleaned) else cleaned


def check_free(file: str, taken: Container[str], source: str) -> None:
    if file in taken:
        message = f"{source} would be generated as {file}, which is taken"
        raise GenerationError(message, hint="rename the query file", path=source)


def distinct(names: Iterable[str]) -> list[str]:
    """Numbers repeated names from the second on, `id`, `id_2`, `id_3`, and skips names that are taken."""
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


# --- Singulars ----------------------------------------------------------------------------------------------
# The reference applies the rules of Rails as in jinzhu/inflection v1.0.0: the first rule that matches wins,
# it matches at the end of the whole name (so `app_people` becomes `app_person`), and each rule is tried in
# capitals, as written, and in any mix of case. Its known mistakes (`canvas` becomes `canva`, `data` becomes
# `datum`) are part of the contract; `inflection_exclude_table_names` and `emit_exact_table_names` avoid them.

# Kept if they are the whole name; the last two by the generators themselves.
_KEPT = words("equipment information rice money species series fish sheep jeans police campus meta")
_IRREGULAR = "people=person men=man children=child sexes=sex moves=move mombies=mombie"
# Tried in this order. `^` and `$` match the ends of the whole name.
_RULES = r"""
    (database)s$=\1 (quiz)zes$=\1 (matr)ices$=\1ix (vert|ind)ices$=\1ex ^(ox)en=\1 (alias|status)(?:es)?$=\1
    (octop|vir)(?:us|i)$=\1us ^(a)x[ie]s$=\1xis (cris|test)(?:is|es)$=\1is (shoe)s$=\1 (o)es$=\1
    (bus)(?:es)?$=\1 ^(m|l)ice$=\1ouse (x|ch|ss|sh)es$=\1 (c)ookies$=\1ookie (m)ovies$=\1ovie
    (s)eries$=\1eries ([^aeiouy]|qu)ies$=\1y ([lr])ves$=\1f (tive)s$=\1 (hive)s$=\1 ([^f])ves$=\1fe
    (^analy)(?:sis|ses)$=\1sis (analy|ba|diagno|parenthe|progno|synop|the)(?:sis|ses)$=\1sis ([ti])a$=\1um
    (n)ews$=\1ews (ss)$=\1 s$=
"""


def singular(name: str, exclude: Iterable[str] = ()) -> str:
    """The singular of `name`; a name in `exclude` (in any case) stays unchanged."""
    if name.casefold() in {*_KEPT, *(each.casefold() for each in exclude)}:
        return name
    for pattern, replacement in _compiled():
        changed, count = pattern.subn(replacement, name)
        if count:
            return changed
    return name


@functools.cache
def _compiled() -> list[tuple[re.Pattern[str], str]]:
    compiled: list[tuple[re.Pattern[str], str]] = []
    for pair in _IRREGULAR.split():
        for spelled in (pair.upper(), "=".join(map(str.capitalize, pair.split("="))), pair):
            plural, _, one = spelled.partition("=")
            compiled.append((re.compile(plural + r"\Z"), one))
    for rule in _RULES.split():
        find, _, replacement = rule.rpartition("=")
        compiled.append((re.compile(find.upper().replace("$", r"\Z")), replacement.upper()))
        compiled.append((re.compile(find.replace("$", r"\Z")), replacement))
        compiled.append((re.compile(find.replace("$", r"\Z"), re.IGNORECASE), replacement))
    return compiled
