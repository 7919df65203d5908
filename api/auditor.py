"""The thread that audits the indexes in Redis: each minute in one API process, and after noted damage."""

import logging
import threading

import redis

from api.redis_clients import connect
from api.settings import ApiSettings
from tokenmill.protocol.store.audit import Audit

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 60.0
"""Period of audits. A task that an index has lost waits at most this long for its return."""
LOOK_SECONDS = 1.0


def start_auditor(settings: ApiSettings) -> None:
    """Start the thread; it ends with the process."""
    audit = Audit(connect(settings.redis_url), retention_seconds=settings.retention_seconds)
    threading.Thread(target=_audit_for_ever, args=(audit,), name="auditor", daemon=True).start()


def audit_if_due(audit: Audit) -> None:
    """Audit once if it is time. An error is logged: the next call tries again."""
    try:
        if audit.is_due(AUDIT_SECONDS) and (num_mended := audit.run()):
            logger.warning("%d tasks and models were missing in an index and were restored", num_mended)
    except redis.ConnectionError:
        # Every other part of the process reports the outage.
        logger.debug("Redis is away, nothing is audited", exc_info=True)
    except Exception:
        logger.exception("an audit of the indexes failed")


def _audit_for_ever(audit: Audit) -> None:
    pause = threading.Event()
    while not pause.wait(LOOK_SECONDS):
        audit_if_due(audit)
