"""Benchmarks of fairq: `python -m benchmarks --help`."""
