"""Benchmarks of fairq: `python -m benchmarks --help`."""

import os
from pathlib import Path

# Keeps matplotlib's list of fonts in the clone, not in the home folder.
os.environ.setdefault("MPLCONFIGDIR", str(Path(__file__).resolve().parents[1] / ".cache" / "matplotlib"))
