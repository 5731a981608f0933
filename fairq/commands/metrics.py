"""`fairq metrics`: metrics for Prometheus."""

from __future__ import annotations

import click

from fairq import metrics as exporter
from fairq.cli import amount, command, wants_json
from fairq.commands.common import session, show


@command(rights="fairq_observe")
@amount(
    "--groups",
    20,
    "How many groups get their own series, over all queues: those most behind or waiting longest.",
    least=0,
    most=1000,
)
def metrics(groups: int) -> None:
    """They come from the database and cover all workers, so one exporter is enough. fairq web serves the same
    at /metrics.

    fairq metrics
    fairq metrics > fairq.prom     for the textfile collector of node_exporter
    """
    with session() as conn:
        if wants_json():
            found = exporter.samples(conn, groups=groups)
            named = [{"name": name, "labels": labels, "value": value} for name, labels, value in found]
            show({"metrics": named})
        else:
            click.echo(exporter.render(conn, groups=groups), nl=False)
