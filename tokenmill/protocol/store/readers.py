"""The readers of tasks that are cancelled when their last reader disconnects. Each method runs one script.

Invariant: such a task is cancelled only after the client of its last reader disconnected, or after that
reader lapsed, as it does when its process dies. Readers of other tasks are not stored.
"""

from tokenmill.protocol.store.scripting import RedisClient, Scripts


class Readers:
    """Readers in one Redis database. `client`, `retention_seconds`: as for the task store."""

    def __init__(self, client: RedisClient, *, retention_seconds: float = 3600) -> None:
        self._scripts = Scripts(client, retention_seconds=retention_seconds)

    def read(self, task_id: str, reader: str, seconds: float) -> None:
        """Register `reader` (any unique text), or extend it; it lapses after `seconds`."""
        self._scripts.run("readers/add", task_id, reader, seconds)

    def leave(self, task_id: str, reader: str, *, gone: bool) -> bool:
        """Remove `reader`. `gone`: its client disconnected, so the task is cancelled if no reader is left.
        Returns whether it was.
        """
        return bool(self._scripts.run("readers/remove", task_id, reader, int(gone)))
