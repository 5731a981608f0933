"""fairq in the open harness: see README.md."""
