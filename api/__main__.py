"""`python -m api`: the API as a process, set up by environment variables."""

from worker.protocol.startup_signals import end_on_signals

if __name__ == "__main__":
    # First of all: the imports below take a second.
    end_on_signals()

import os
import sys

from api.server import CannotListen, serve
from api.settings import ApiSettings, SettingError

EXIT_FAILED = 1
EXIT_UNUSABLE = 78
"""A setting cannot be used: starting again is of no use. Of sysexits.h, as the worker's."""


def main() -> int:
    try:
        serve(ApiSettings.from_env(os.environ))
    except (SettingError, CannotListen) as error:
        print(f"tokenmill api: {error}", file=sys.stderr)  # noqa: T201 - what the user must read
        # An address that is taken today may be free at the next start.
        return EXIT_UNUSABLE if isinstance(error, SettingError) else EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
