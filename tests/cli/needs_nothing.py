"""A module for a command that a test makes up."""

import click

fail: click.Command
