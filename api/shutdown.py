"""The request to stop that the process's signal handlers pass to open calls and threads."""


class Shutdown:
    """Set once, from a signal handler: a plain attribute needs no lock there."""

    requested: bool = False
