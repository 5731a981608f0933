"""Typed wrappers, generated from annotated SQL: two front ends, one model, two templates."""

from __future__ import annotations

from dataclasses import replace

from fairq.codegen.model import Request, Template


def generate(request: Request) -> dict[str, str]:
    """File name to text, for the template the options name."""
    if request.options.template == Template.PSYCOPG:
        from fairq.codegen import psycopg

        return psycopg.generate(request)
    from fairq.codegen import remarks, sqlalchemy

    if not request.options.strict:
        request = replace(request, queries=tuple(map(remarks.apply, request.queries)))
    return sqlalchemy.generate(request)


__all__ = ["generate"]
