"""`tokenmill completion`: prints the script that completes commands and flags in a shell."""

import click
from click.shell_completion import get_completion_class

from tokenmill.cli.text_streams import write_stdout

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_TOKENMILL_COMPLETE"
"""In which click reads, in a shell with the script, what is to be completed."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands and flags in bash, zsh or fish.

    \b
    Examples:
      tokenmill completion bash > ~/.local/share/bash-completion/completions/tokenmill
      eval "$(tokenmill completion zsh)"                                   # in ~/.zshrc
      tokenmill completion fish > ~/.config/fish/completions/tokenmill.fish
    """
    script = get_completion_class(shell)
    assert script is not None
    write_stdout(script(ctx.find_root().command, {}, "tokenmill", VARIABLE).source(), end="")
