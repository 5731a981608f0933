"""Generates typed wrappers from annotated SQL: two front ends, one model, two templates."""

from __future__ import annotations

from fairq.codegen.model import GenerationError, Request, Template


def generate(request: Request) -> dict[str, str]:
    """File names and texts, by the template that the options name."""
    if request.engine != "postgresql":
        raise GenerationError(f"engine {request.engine!r} is not supported", hint="use `engine: postgresql`")
    if request.options.template == Template.PSYCOPG:
        from fairq.codegen.psycopg import generate
    else:
        from fairq.codegen.sqlalchemy import generate
    return generate(request)
