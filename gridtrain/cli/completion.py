"""`gridtrain completion SHELL`: prints a completion script for the shell, which click generates."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gridtrain.cli.main import cli

PROGRAM, VARIABLE = "gridtrain", "_GRIDTRAIN_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes gridtrain's commands and options in your shell.

    \b
      gridtrain completion bash >> ~/.bashrc       (bash 4.4 or newer)
      gridtrain completion zsh  >> ~/.zshrc
      gridtrain completion fish >  ~/.config/fish/completions/gridtrain.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(cli, {}, PROGRAM, VARIABLE)
    click.echo(made.source_template % made.source_vars())  # source() would start a shell to learn its version
