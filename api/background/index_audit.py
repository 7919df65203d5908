"""Repairs the indexes in Redis: every minute in one of the API processes, and whenever damage is recorded."""

import logging

from api.background.periodic import start_periodic
from api.redis_clients import connect, is_unavailable
from tokenmill.protocol.store.audit import Audit
from tokenmill.settings.declarations import ApiSettings

logger = logging.getLogger(__name__)

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
            logger.warning("%d tasks and models were missing from an index and were restored", num_repaired)
    except Exception as error:
        # The client has logged an outage.
        if not is_unavailable(error):
            logger.exception("an audit of the indexes failed")
    return CHECK_SECONDS
