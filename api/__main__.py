"""`python -m api`: runs the API, configured by environment variables."""

from tokenmill.process.startup_signals import exit_on_signals

if __name__ == "__main__":
    # Before the imports below, which take a second.
    exit_on_signals()

import os
import sys

import structlog

from api.file_storage import UnusableStorage
from api.process import CannotListen, serve
from tokenmill.process import logs
from tokenmill.process.hold_unusable import hold_unusable
from tokenmill.process.temporary_directory import NoTemporaryDirectory, check_temporary_directory
from tokenmill.settings.declarations import VARIABLES, ApiSettings
from tokenmill.settings.errors import SettingError
from tokenmill.settings.unknown import warnings

EXIT_FAILED = 1
EXIT_UNUSABLE = 78
"""EX_CONFIG of sysexits.h: a setting is invalid, so a restart does not help. The worker uses the same."""


_log = structlog.get_logger("api")


def main() -> int:
    logs.start("api")
    try:
        return _run()
    finally:
        logs.flush()


def _run() -> int:
    for line in warnings(os.environ, VARIABLES):
        _log.warning(line)
    try:
        settings = ApiSettings.load(os.environ)
        settings.check_files()
        check_temporary_directory()
        serve(settings)
    except (SettingError, NoTemporaryDirectory, UnusableStorage) as error:
        _log.critical(str(error))
        hold_unusable(os.environ, _log.critical)
        return EXIT_UNUSABLE
    except CannotListen as error:
        # The address may be free at the next start.
        _log.critical(str(error))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
