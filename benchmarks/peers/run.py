"""`python -m benchmarks.peers.run <peer> <role>`: one adapter in one role, as the runner starts it."""

import importlib
import sys

from benchmarks.peers import protocol

if __name__ == "__main__":
    protocol.main(importlib.import_module(f"benchmarks.peers.{sys.argv[1]}").PEER, sys.argv[2])
