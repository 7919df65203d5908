"""The `tokenmill` program. Stop signals work before the libraries of a command are loaded."""

import signal

from tokenmill.process.startup_signals import exit_on_signals


def main() -> None:
    exit_on_signals()
    from tokenmill.cli.main import main as command

    # Commands handle KeyboardInterrupt, to report the state of a task.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
