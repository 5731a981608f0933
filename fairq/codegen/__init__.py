"""Typed wrappers, generated from annotated SQL: two front ends, one model, two templates."""

from __future__ import annotations

from fairq.codegen.model import Request, Template


def generate(request: Request) -> dict[str, str]:
    """File name to text, for the template the options name."""
    if request.options.template == Template.PSYCOPG:
        from fairq.codegen import psycopg

        return psycopg.generate(request)
    from fairq.codegen import sqlalchemy

    return sqlalchemy.generate(request)


__all__ = ["generate"]
