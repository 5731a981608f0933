"""Benchmarks of fairq: `python -m benchmarks --help`."""

import os
from pathlib import Path

# matplotlib keeps a list of fonts. Into the clone with it: nothing here writes into the home folder.
os.environ.setdefault("MPLCONFIGDIR", str(Path(__file__).resolve().parents[1] / ".cache" / "matplotlib"))
