"""Typed wrappers, generated from annotated SQL: two front ends, one model, two templates."""
