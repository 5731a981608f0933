"""A place for a command that a test makes up."""

import click

command: click.Command
