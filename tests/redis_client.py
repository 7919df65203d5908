"""The type of redis-py's client in tests.

redis-py types each reply as a union of the forms of all protocol versions and of the asynchronous client.
Tests assert on replies, so they use the client untyped.
"""

from typing import Any, TypeAlias

RedisClient: TypeAlias = Any
