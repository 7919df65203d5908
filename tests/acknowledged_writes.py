"""Checks that a Redis server keeps every write that it has acknowledged."""

import redis

from tests.live_service import wait_for

_ITEM_BYTES = 1000


def push_until_it_ends(url: str) -> int:
    """Push items until the server exits. Returns the number of acknowledged ones."""
    with redis.Redis.from_url(url, retry=None) as client:
        for number in range(1_000_000):
            try:
                client.rpush("items", str(number).ljust(_ITEM_BYTES, "x"))
            except redis.ConnectionError:
                return number
    raise AssertionError("the server did not run out of space")


def check_kept(url: str, num_acknowledged: int) -> None:
    """Wait until the server answers. It has all of them, and perhaps one that it did not acknowledge."""

    def answers() -> bool:
        try:
            with redis.Redis.from_url(url) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    wait_for(answers, "Redis answers")
    with redis.Redis.from_url(url) as client:
        kept = [int(item.rstrip(b"x")) for item in client.lrange("items", 0, -1)]
    assert kept in (list(range(num_acknowledged)), list(range(num_acknowledged + 1)))
