"""`python -m benchmarks.peers`: install the peers and say what each one is."""

import json
import subprocess

import click

from benchmarks.peers import places

NAMES = list(places.places())


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The queues that `python -m benchmarks run peers` measures beside fairq."""


@main.command("install")
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
def install_peers(names: tuple[str, ...]) -> None:
    """Install peers (all, or those named) into .cache/peers, each in an environment of its own."""
    failed = 0
    for name in names or NAMES:
        try:
            places.install(places.places()[name], click.echo)
        except places.Missing as exc:
            failed += 1
            click.echo(f"{name}: {exc}", err=True)
    if failed:
        raise SystemExit(1)


@main.command("about")
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
def tell_about(names: tuple[str, ...]) -> None:
    """Say how each peer is configured, what it lacks and where that is documented."""
    for name in names or NAMES:
        place = places.places()[name]
        try:
            command = place.command("about")
        except places.Missing as exc:
            click.echo(f"{name}: {exc}\n")
            continue
        done = subprocess.run(
            command, env=place.environment(), cwd=places.ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        about = json.loads(done.stdout)
        click.echo(f"{name}: {about['version']}\n  runs with   {about['configuration']}")
        click.echo(f"  fairness    {about['fairness'] or 'none'}")
        click.echo(f"  lacks       {', '.join(about['lacks']) or 'nothing that is measured here'}")
        for page in about["docs"]:
            click.echo(f"  documented  {page}")
        click.echo()


if __name__ == "__main__":
    main()
