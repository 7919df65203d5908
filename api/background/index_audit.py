"""Repairs the indexes in Redis: every minute in one of the API processes, and whenever damage is recorded."""

import structlog

from api.background.periodic import start_periodic
from api.redis_clients import connect, is_unavailable
from tokenmill.protocol.store.audit import Audit
from tokenmill.settings.declarations import ApiSettings

_log = structlog.get_logger(__name__)

AUDIT_SECONDS = 60.0
"""Period of audits. A task missing from an index waits at most this long."""
CHECK_SECONDS = 1.0
"""Interval at which the thread asks Redis whether an audit is due."""


def start_index_audit(settings: ApiSettings) -> None:
    """Start the thread. It ends with the process."""
    audit = Audit(connect(settings.redis_url), retention_seconds=settings.retention_seconds)
    start_periodic("index-audit", lambda: audit_if_due(audit))


def audit_if_due(audit: Audit) -> float:
    """Audit once if it is due. Returns the seconds until the next call. Raises nothing."""
    try:
        if audit.is_due(AUDIT_SECONDS) and (num_repaired := audit.run()):
            _log.warning("tasks and models were missing from an index and were restored", count=num_repaired)
    except Exception as error:  # noqa: BLE001 - it is logged
        # The client has logged an outage.
        if not is_unavailable(error):
            _log.exception("an audit of the indexes failed")
    return CHECK_SECONDS
