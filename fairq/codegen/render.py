"""The templates, and the one way to fill them."""

from __future__ import annotations

import functools
from typing import Any

import jinja2


@functools.cache
def environment() -> jinja2.Environment:
    """Templates hold Python text: nothing is escaped, a missing value is an error, block lines vanish."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("fairq.codegen"),
        autoescape=False,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(values)
