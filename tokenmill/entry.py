"""The `tokenmill` program. Requests to stop are heard before the libraries of the command are loaded."""

import signal

from tokenmill.process.startup_signals import exit_on_signals


def main() -> None:
    exit_on_signals()
    from tokenmill.cli.main import main as command

    # The command line ends by an exception and says in which state it leaves a task.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
