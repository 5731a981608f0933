"""Adapters of other PostgreSQL queues, one file each, and what installs them: see README.md."""
