"""One Redis connection for each thread: the pool of redis-py raises when it is exhausted."""

import threading
from concurrent.futures import ThreadPoolExecutor

import redis

from api.redis_clients import connect
from tests.api.api_client import client_of
from tests.api.conftest import MakeApp
from tokenmill.settings.declarations import ApiSettings

NUM_THREADS = 150
"""More than the defaults of redis-py (100) and of `connect` (128)."""


def test_each_of_max_threads_gets_a_connection(redis_url: str) -> None:
    """At its default size the pool lost 84 of 200 streams."""
    client = connect(redis_url, max_threads=NUM_THREADS)
    together = threading.Barrier(NUM_THREADS)

    def take() -> redis.connection.ConnectionInterface:
        together.wait(60)
        return client.connection_pool.get_connection()

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        connections = [future.result() for future in [threads.submit(take) for _ in range(NUM_THREADS)]]
    assert len(set(connections)) == NUM_THREADS
    client.connection_pool.disconnect()


def test_every_http_thread_gets_a_connection(
    redis_url: str, redis_client: redis.Redis, make_app: MakeApp
) -> None:
    """Redis holds all submissions, each with its connection, until every thread has sent one."""
    app = make_app(ApiSettings(redis_url=redis_url, http_threads=NUM_THREADS, max_streams=1))

    def submit() -> int:
        return client_of(app).post("/v1/tasks", json={"prompt": "x"}).status_code

    others = connections(redis_client)
    redis_client.client_pause(60_000, all=False)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            replies = [threads.submit(submit) for _ in range(NUM_THREADS)]
            while not any(reply.done() for reply in replies):
                if len(connections(redis_client) - others) >= NUM_THREADS:
                    break
            redis_client.client_unpause()
            assert [reply.result() for reply in replies] == [202] * NUM_THREADS
    finally:
        redis_client.client_unpause()


def connections(client: redis.Redis) -> set[str]:
    """The ids of the connections that Redis has."""
    return {connection["id"] for connection in client.client_list()}
