"""Reads a Redis URL and makes a client of it: of one server, or of the master that Sentinels name.

Law: every room reads a URL here, so that all connect to the same place or all refuse it; what is not known in
it is refused by name. A URL says where Redis is and as whom to speak; how long to wait is said by the caller.
Knows no library: `redis` or `redis.asyncio` is passed in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_LISTED = ", ".join(f"{scheme}://" for scheme in SCHEMES[:-1]) + f" or {SCHEMES[-1]}://"
SERVER_PORT = 6379
SENTINEL_PORT = 26379


class BadRedisUrl(ValueError):
    """No client can be made of this URL. The message says what it must be, and shows nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """What a URL says.

    `nodes`: host and port of the server, or of each Sentinel; none of a Unix socket. `service`: the name
    under which the Sentinels watch the server; "" where the server itself is named. `options` of its
    connections, as redis-py calls them; `sentinel_options` of those to the Sentinels.
    """

    nodes: tuple[tuple[str, int], ...] = ()
    service: str = ""
    tls: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def parse(url: str) -> RedisAddress:
    """Of one server `redis://[user:password@]host[:port][/db]`, or `unix://[user:password@]/path[?db=n]`; of
    Sentinels `redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]`; with TLS
    `rediss` in the place of `redis`. User and password are those of the server.

    Options behind `?`: `db`, `username`, `password`, `ssl_...` (also for the Sentinels), `sentinel_username`,
    `sentinel_password`. Raises `BadRedisUrl`.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise BadRedisUrl(f"an address that starts with {_LISTED}")
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    options = {**_credentials(credentials), **_query(query)}
    if scheme == "unix":
        return _socket(hosts, path, options)
    if scheme.endswith("+sentinel"):
        return _sentinels(hosts, path, options, tls=scheme.startswith("rediss"))
    return _server(hosts, path, options, tls=scheme == "rediss")


def client(library: Any, url: str, **options: Any) -> Any:
    """A client that connects at its first call. `library`: `redis` or `redis.asyncio`; `options`: of its
    connections, as the library calls them.

    Behind Sentinels each new connection asks them for the master, and one that turns out to lead to a server
    which only reads is given up. `retry` and `socket_...` hold for the Sentinels too: without them the
    library would try each ten times in silence. Raises `BadRedisUrl`.
    """
    address = parse(url)
    settings = {**options, **address.options}
    if "path" in address.options:
        # TCP only: the library's class for Unix sockets raises TypeError for it.
        settings.pop("socket_keepalive", None)
    if not address.service:
        pool = library.ConnectionPool(connection_class=_connection_class(library, address), **settings)
        return library.Redis.from_pool(pool)
    shared = {name: value for name, value in options.items() if name == "retry" or name.startswith("socket_")}
    manager = library.Sentinel(address.nodes, sentinel_kwargs={**shared, **address.sentinel_options})
    return manager.master_for(address.service, redis_class=library.Redis, ssl=address.tls, **settings)


def hide_password(url: str) -> str:
    """`url` as it may be shown: without credentials and options."""
    place, mark, query = url.partition("?")
    scheme, separator, _ = url.partition("://") if "://" in url else ("", "", url)
    _, at, host = place.rpartition("@")
    if "@" in query and not at:
        # A password may hold a question mark that its owner forgot to escape: nothing is known to be a host.
        return f"{scheme}{separator}***"
    return (f"{scheme}{separator}***@{host}" if at else place) + ("?***" if mark else "")


def _connection_class(library: Any, address: RedisAddress) -> Any:
    if "path" in address.options:
        return library.UnixDomainSocketConnection
    return library.SSLConnection if address.tls else library.Connection


def _server(hosts: str, path: str, options: dict[str, Any], *, tls: bool) -> RedisAddress:
    _refuse_sentinel_options(options)
    host, port = _node(hosts, SERVER_PORT)
    options = {"host": host, "port": port, "db": _database(path), **options}
    return RedisAddress(nodes=((host, port),), tls=tls, options=options)


def _socket(hosts: str, path: str, options: dict[str, Any]) -> RedisAddress:
    _refuse_sentinel_options(options)
    if hosts or not path:
        raise BadRedisUrl("an address with the path of a socket, as unix:///run/redis.sock")
    return RedisAddress(options={"path": f"/{unquote(path)}", **options})


def _sentinels(hosts: str, path: str, options: dict[str, Any], *, tls: bool) -> RedisAddress:
    service, _, database = path.partition("/")
    if not service:
        raise BadRedisUrl(
            "an address with the service that the Sentinels watch, as redis+sentinel://host/service"
        )
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    given = {name: value for name, value in own.items() if value is not None}
    # One authority signs for all of an installation.
    trust = {name: value for name, value in options.items() if name.startswith("ssl_")}
    return RedisAddress(
        nodes=tuple(_node(host, SENTINEL_PORT) for host in hosts.split(",")),
        service=unquote(service),
        tls=tls,
        options={"db": _database(database), **options},
        sentinel_options={"ssl": tls, **trust, **given},
    )


def _credentials(text: str) -> dict[str, Any]:
    username, _, password = text.partition(":")
    given = {"username": unquote(username), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _node(text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]` or `[v6]:port`; an empty one is this machine."""
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        is_right = closed and (not port or port.startswith(":"))
        port = port[1:]
    else:
        host, _, port = text.partition(":")
        is_right = True
    if not is_right or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise BadRedisUrl("an address whose hosts are written as host or host:port")
    return unquote(host) or "localhost", int(port or default_port)


def _database(text: str) -> int:
    return _number(unquote(text)) if text else 0


def _number(text: str) -> int:
    if not text.isdecimal():
        raise BadRedisUrl("an address whose database is a number")
    return int(text)


def _truth(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise BadRedisUrl("an address whose ssl_check_hostname is true or false")
    return known[text.lower()]


_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "db": _number,
    "username": str,
    "password": str,
    "sentinel_username": str,
    "sentinel_password": str,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_cert_reqs": str,
    "ssl_check_hostname": _truth,
}


def _query(text: str) -> dict[str, Any]:
    given = dict(parse_qsl(text, keep_blank_values=True))
    if not given.keys() <= _OPTIONS.keys():
        raise BadRedisUrl(f"an address with no other options than {', '.join(_OPTIONS)}")
    return {name: _OPTIONS[name](value) for name, value in given.items()}


def _refuse_sentinel_options(options: Mapping[str, Any]) -> None:
    if any(name.startswith("sentinel_") for name in options):
        raise BadRedisUrl("an address of Sentinels, redis+sentinel://, where it has options for them")
