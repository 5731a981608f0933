"""`fairq completion`: the shell's half of completing on TAB."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print a script that makes your shell complete on TAB.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that makes your shell complete on TAB.

    \b
    bash:  echo 'eval "$(fairq completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(fairq completion zsh)"' >> ~/.zshrc
    fish:  fairq completion fish > ~/.config/fish/completions/fairq.fish

    \b
    Exit codes: 0 done · 2 wrong usage
    """
    root = click.get_current_context().find_root()
    found = get_completion_class(shell)
    assert found is not None  # the choices above
    click.echo(_source(found, root))


def _source(found: type, root: click.Context) -> str:
    made = found(root.command, {}, "fairq", "_FAIRQ_COMPLETE")
    # Not made.source(): for bash that runs the bash of the PATH to see how old it is.
    text: str = made.source_template % made.source_vars()
    return text
