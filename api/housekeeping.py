"""Ends what waits too long, also while no worker is up, and puts back what a dead worker left.

Law: it decides nothing. When a task is overdue or a lease has lapsed is for the store to say.
"""

import logging
import threading

import redis

from api.redis_clients import connect
from api.settings import ApiSettings
from worker.protocol.store import TaskStore

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
"""Before the first time, so that workers that start with this process come back for their tasks."""
PERIOD_SECONDS = 1.0
"""No more than so late a task ends whose limit has passed."""
PAUSE_SECONDS = 60.0
"""After an outage, so that workers that live can renew their leases before anyone calls them lapsed."""


def start_reaper(settings: ApiSettings) -> None:
    """Start the thread; it ends with the process."""
    store = TaskStore(connect(settings.redis_url), retention_seconds=settings.retention_seconds)
    threading.Thread(target=_reap_for_ever, args=(settings, store), name="reaper", daemon=True).start()


def reap(settings: ApiSettings, store: TaskStore) -> float:
    """Reap once; gives the seconds until the next time."""
    try:
        reaped = store.reap(settings.slug, max_task_seconds=settings.max_task_seconds)
    except redis.RedisError as error:
        logger.warning("overdue tasks cannot be looked for: %s", error)
        return PAUSE_SECONDS
    if reaped.timed_out or reaped.returned:
        logger.info(
            "%d tasks waited too long, %d were taken back from dead workers",
            len(reaped.timed_out),
            len(reaped.returned),
        )
    return PERIOD_SECONDS


def _reap_for_ever(settings: ApiSettings, store: TaskStore) -> None:
    pause = threading.Event()
    seconds = START_SECONDS
    while not pause.wait(seconds):
        seconds = reap(settings, store)
