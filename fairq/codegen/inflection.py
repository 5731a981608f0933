"""The singular of a table's name, as the reference generators build it.

The reference applies the rules of Rails as jinzhu/inflection v1.0.0 has them: the first rule that matches
wins, it matches at the end of the whole name (so `app_people` is `app_person`), and each rule is tried in
capitals, as written, and in any mix of case. Its known slips (`canvas` gives `canva`, `data` gives `datum`)
are part of the contract: `inflection_exclude_table_names` and `emit_exact_table_names` avoid them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

# Left alone, when they are the whole name.
_UNCOUNTABLE = frozenset(
    {"equipment", "information", "rice", "money", "species", "series", "fish", "sheep", "jeans", "police"}
)

# Kept by the generators themselves, which know that the rules get them wrong.
_KEPT = frozenset({"campus", "meta"})

_IRREGULAR = {
    "people": "person",
    "men": "man",
    "children": "child",
    "sexes": "sex",
    "moves": "move",
    "mombies": "mombie",
}

# Tried from top to bottom. `^` and `$` are the ends of the whole name.
_RULES = (
    (r"(database)s$", r"\1"),
    (r"(quiz)zes$", r"\1"),
    (r"(matr)ices$", r"\1ix"),
    (r"(vert|ind)ices$", r"\1ex"),
    (r"^(ox)en", r"\1"),
    (r"(alias|status)(?:es)?$", r"\1"),
    (r"(octop|vir)(?:us|i)$", r"\1us"),
    (r"^(a)x[ie]s$", r"\1xis"),
    (r"(cris|test)(?:is|es)$", r"\1is"),
    (r"(shoe)s$", r"\1"),
    (r"(o)es$", r"\1"),
    (r"(bus)(?:es)?$", r"\1"),
    (r"^(m|l)ice$", r"\1ouse"),
    (r"(x|ch|ss|sh)es$", r"\1"),
    (r"(c)ookies$", r"\1ookie"),
    (r"(m)ovies$", r"\1ovie"),
    (r"(s)eries$", r"\1eries"),
    (r"([^aeiouy]|qu)ies$", r"\1y"),
    (r"([lr])ves$", r"\1f"),
    (r"(tive)s$", r"\1"),
    (r"(hive)s$", r"\1"),
    (r"([^f])ves$", r"\1fe"),
    (r"(^analy)(?:sis|ses)$", r"\1sis"),
    (r"(analy|ba|diagno|parenthe|progno|synop|the)(?:sis|ses)$", r"\1sis"),
    (r"([ti])a$", r"\1um"),
    (r"(n)ews$", r"\1ews"),
    (r"(ss)$", r"\1"),
    (r"s$", ""),
)


def singular(name: str, exclude: Iterable[str] = ()) -> str:
    """The singular of `name`; a name in `exclude` (in any case) stays as it is."""
    folded = name.casefold()
    if folded in _KEPT or any(folded == kept.casefold() for kept in exclude) or folded in _UNCOUNTABLE:
        return name
    for pattern, replacement in _compiled():
        changed, count = pattern.subn(replacement, name)
        if count:
            return changed
    return name


@functools.cache
def _compiled() -> tuple[tuple[re.Pattern[str], str], ...]:
    compiled: list[tuple[re.Pattern[str], str]] = []
    for plural, one in _IRREGULAR.items():
        for change in (str.upper, str.capitalize, str):
            compiled.append((re.compile(change(plural) + r"\Z"), change(one)))
    for find, replacement in _RULES:
        ending = find.replace("$", r"\Z")
        compiled.append((re.compile(find.upper().replace("$", r"\Z")), replacement.upper()))
        compiled.append((re.compile(ending), replacement))
        compiled.append((re.compile(ending, re.IGNORECASE), replacement))
    return tuple(compiled)
