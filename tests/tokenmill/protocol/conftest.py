"""Fixtures: a task store on an empty database, and a claimed task."""

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import claim_one, submit
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.task_store import TaskStore


@pytest.fixture
def store(redis_client: RedisClient) -> TaskStore:
    return TaskStore(redis_client)


@pytest.fixture
def claimed(store: TaskStore, redis_client: RedisClient) -> Claimed:
    submit(store, redis_client)
    return claim_one(store)
