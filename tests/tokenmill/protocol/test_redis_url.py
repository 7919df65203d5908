"""Parsing Redis URLs and creating clients from them."""

from typing import Any

import pytest
import redis
import redis.asyncio

from tokenmill.protocol.redis_url import BadRedisUrl, RedisAddress, client, hide_password, parse

TLS: Any = {"ssl_ca_certs": "/ca.pem"}
HERE = "localhost"


def server(
    host: str = HERE, port: int = 6379, db: int = 0, *, tls: bool = False, **more: Any
) -> RedisAddress:
    options = {"host": host, "port": port, "db": db, **more}
    return RedisAddress(nodes=((host, port),), tls=tls, options=options)


def sentinels(*nodes: tuple[str, int], db: int = 0, tls: bool = False, **more: Any) -> RedisAddress:
    own = more.pop("own", {})
    trust = {name: value for name, value in more.items() if name.startswith("ssl_")}
    return RedisAddress(
        nodes=nodes,
        service="mill",
        tls=tls,
        options={"db": db, **more},
        sentinel_options={"ssl": tls, **trust, **own},
    )


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h:1/2", server("h", 1, 2)),
        ("redis://", server()),
        ("redis://h/", server("h")),
        ("redis://[::1]:7/0", server("::1", 7)),
        ("redis://[::1]", server("::1")),
        ("redis://u:p%40%2F@h", server("h", username="u", password="p@/")),
        ("redis://:p:q@h?db=3", server("h", db=3, password="p:q")),
        ("rediss://h?ssl_ca_certs=/ca.pem", server("h", tls=True, **TLS)),
        ("rediss://h?ssl_check_hostname=no", server("h", tls=True, ssl_check_hostname=False)),
        ("unix:///run/redis.sock?db=1", RedisAddress(options={"path": "/run/redis.sock", "db": 1})),
        ("unix://:pw@/s", RedisAddress(options={"path": "/s", "password": "pw"})),
        ("redis+sentinel://h/mill", sentinels(("h", 26379))),
        ("redis+sentinel://a:1,b,[::1]:3/mill/4", sentinels(("a", 1), ("b", 26379), ("::1", 3), db=4)),
        (
            "redis+sentinel://u:p@h/mill?sentinel_username=su&sentinel_password=s%26p",
            sentinels(("h", 26379), username="u", password="p", own={"username": "su", "password": "s&p"}),
        ),
        ("rediss+sentinel://h/mill?ssl_ca_certs=/ca.pem", sentinels(("h", 26379), tls=True, **TLS)),
    ],
)
def test_a_url_is_parsed(url: str, address: RedisAddress) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("", "starts with redis://"),
        ("h:6379", "starts with redis://"),
        ("sentinel://h/mill", "redis+sentinel://"),
        ("redis://h:port", "host:port"),
        ("redis://h:0", "host:port"),
        ("redis://h:65536", "host:port"),
        ("redis://a:1,b:2", "host:port"),
        ("redis://[::1", "host:port"),
        ("redis://[::1]7", "host:port"),
        ("redis://h/mill", "database"),
        ("redis://h/-1", "database"),
        ("redis://h?db=x", "database"),
        ("redis://h?decode_responses=true", "no other options"),
        ("redis://h?sentinel_password=x", "an address of Sentinels"),
        ("rediss://h?ssl_check_hostname=maybe", "ssl_check_hostname"),
        ("unix://", "path of a socket"),
        ("unix://s", "path of a socket"),
        ("redis+sentinel://h", "service"),
        ("redis+sentinel://h/", "service"),
        ("redis+sentinel://h//0", "service"),
        ("redis+sentinel://a:1,b:x/mill", "host:port"),
        ("redis+sentinel://h/mill/zero", "database"),
    ],
)
def test_an_invalid_url_is_refused_without_showing_it(url: str, wanted: str) -> None:
    with pytest.raises(BadRedisUrl, match=r"^an address ") as raised:
        parse(url.replace("://", "://user:secret@", 1) if "://" in url else url)
    assert wanted in str(raised.value)
    assert "secret" not in str(raised.value)


def test_space_around_a_url_is_ignored() -> None:
    """`.tokenmill/redis-url` ends with a newline."""
    assert parse("unix:///run/redis.sock\n") == parse("unix:///run/redis.sock")


def test_passwords_are_hidden() -> None:
    address = parse("redis+sentinel://u:secret@h/mill?sentinel_password=secret")
    assert "secret" not in repr(address)
    assert hide_password("redis://u:secret@h/1?password=secret") == "redis://***@h/1?***"
    assert hide_password("redis://h/1") == "redis://h/1"
    assert hide_password("redis://u:sec?ret@h/1") == "redis://***"
    assert hide_password("u:secret@h") == "***@h"


@pytest.mark.parametrize("library", [redis, redis.asyncio])
def test_sentinels_get_their_own_password_and_the_callers_timeouts(library: Any) -> None:
    url = "rediss+sentinel://u:p@a:1,b:2/mill/3?sentinel_password=s&ssl_ca_certs=/ca.pem"
    retry = object()
    made = client(library, url, retry=retry, socket_timeout=2.5, health_check_interval=7)

    pool = made.connection_pool
    given = pool.connection_kwargs
    assert isinstance(made, library.Redis)
    assert (pool.service_name, given["db"], given["password"]) == ("mill", 3, "p")
    assert (given["retry"], given["socket_timeout"], given["health_check_interval"]) == (retry, 2.5, 7)
    assert issubclass(pool.connection_class, library.SSLConnection)
    asked = pool.sentinel_manager.sentinel_kwargs
    assert asked == {"retry": retry, "socket_timeout": 2.5, "password": "s", "ssl": True, **TLS}
    assert len(pool.sentinel_manager.sentinels) == 2


def test_a_client_of_one_server(redis_url: str) -> None:
    with client(redis, redis_url, client_name="me") as made:
        assert made.client_getname() == "me"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://h", "Connection"),
        ("rediss://h", "SSLConnection"),
        ("unix:///s", "UnixDomainSocketConnection"),
    ],
)
def test_each_scheme_has_its_connection_class(url: str, kind: str) -> None:
    for library in (redis, redis.asyncio):
        assert client(library, url).connection_pool.connection_class is getattr(library, kind)


@pytest.mark.parametrize("library", [redis, redis.asyncio])
def test_a_unix_socket_accepts_the_options_of_every_caller(library: Any) -> None:
    """redis-py's connection for Unix sockets raises TypeError for `socket_keepalive`, which TCP needs."""
    made = client(library, "unix:///s", socket_keepalive=True, socket_timeout=2.5)

    assert made.connection_pool.make_connection().socket_timeout == 2.5
