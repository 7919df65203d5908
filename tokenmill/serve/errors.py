"""The errors that end `tokenmill serve`."""


class CannotServe(Exception):
    """The service cannot start or does not stay up. The message says why and what to do."""


class FatalExit(CannotServe):
    """A process exited with a code that means it can never work with these settings."""
