"""The door to who reads the tasks that end with their last reader: each method is one script.

Law: a task is ended only where its last reader's client went away, or where the reader has lapsed without a
word, as the readers of a process that died. Of other tasks nothing is remembered.
"""

from tokenmill.protocol.store.scripting import RedisClient, Scripts


class Readers:
    """Readers of one Redis database. `client` and `retention_seconds`: as the task store's."""

    def __init__(self, client: RedisClient, *, retention_seconds: float = 3600) -> None:
        self._scripts = Scripts(client, retention_seconds=retention_seconds)

    def read(self, task_id: str, reader: str, seconds: float) -> None:
        """`reader` (any text of its own) is there; it lapses after `seconds` unless told again."""
        self._scripts.run("read", task_id, reader, seconds)

    def leave(self, task_id: str, reader: str, *, gone: bool) -> bool:
        """`reader` is not there any more. `gone`: its client went away, and the task ends as cancelled if no
        other reader is left. Gives whether it did.
        """
        return bool(self._scripts.run("leave", task_id, reader, int(gone)))
