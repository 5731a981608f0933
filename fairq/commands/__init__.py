"""The commands of `fairq`, one module per topic; fairq/cli.py lists them and imports what is called."""
