"""Parses Redis URLs and creates clients: of one server, or of the master behind Sentinels.

Every process parses its URL here, so that all connect to the same server or refuse the URL. Unknown options
are errors. A URL has the address and the credentials; timeouts are the caller's. The library, `redis` or
`redis.asyncio`, is a parameter.
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
    """The URL is invalid. The message says what it must be, without showing any of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A parsed URL.

    `nodes`: host and port of the server, or of each Sentinel; empty for a Unix socket. `service`: the name
    of the master that the Sentinels monitor; "" without Sentinels. `options`, `sentinel_options`: redis-py's
    options of the connections to the server and to the Sentinels.
    """

    nodes: tuple[tuple[str, int], ...] = ()
    service: str = ""
    tls: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def parse(url: str) -> RedisAddress:
    """Parse a URL. Raises `BadRedisUrl`.

    - One server: `redis://[user:password@]host[:port][/db]` or `unix://[user:password@]/path[?db=n]`.
    - Sentinels: `redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]`.
    - TLS: `rediss` instead of `redis`.

    User and password are the server's. Query options: `db`, `username`, `password`, `ssl_...` (also for the
    Sentinels), `sentinel_username`, `sentinel_password`.
    """
    # A URL read from a file, such as `.tokenmill/redis-url`, ends with a newline.
    scheme, separator, rest = url.strip().partition("://")
    if not separator or scheme not in SCHEMES:
        raise BadRedisUrl(f"an address that starts with {_LISTED}")
    location, _, query = rest.partition("?")
    authority, _, path = location.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    options = {**_credentials(credentials), **_query(query)}
    if scheme == "unix":
        return _socket(hosts, path, options)
    if scheme.endswith("+sentinel"):
        return _sentinels(hosts, path, options, tls=scheme.startswith("rediss"))
    return _server(hosts, path, options, tls=scheme == "rediss")


def client(library: Any, url: str, **options: Any) -> Any:
    """Create a client, which connects at its first call. Raises `BadRedisUrl`.

    `library`: `redis` or `redis.asyncio`. `options`: the library's options of connections. With Sentinels
    each new connection asks them for the master, and a connection to a read-only server is closed. `retry`
    and `socket_...` apply to the Sentinels too: by default the library would retry each ten times.
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
    """`url` without credentials and options, for messages."""
    location, mark, query = url.partition("?")
    scheme, separator, _ = url.partition("://") if "://" in url else ("", "", url)
    _, at, host = location.rpartition("@")
    if "@" in query and not at:
        # A password may contain an unescaped question mark, so no part is known to be a host.
        return f"{scheme}{separator}***"
    return (f"{scheme}{separator}***@{host}" if at else location) + ("?***" if mark else "")


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
    credentials = {name: value for name, value in own.items() if value is not None}
    # One certificate authority signs for the whole installation.
    trust = {name: value for name, value in options.items() if name.startswith("ssl_")}
    return RedisAddress(
        nodes=tuple(_node(host, SENTINEL_PORT) for host in hosts.split(",")),
        service=unquote(service),
        tls=tls,
        options={"db": _database(database), **options},
        sentinel_options={"ssl": tls, **trust, **credentials},
    )


def _credentials(text: str) -> dict[str, Any]:
    username, _, password = text.partition(":")
    credentials = {"username": unquote(username), "password": unquote(password)}
    return {name: value for name, value in credentials.items() if value}


def _node(text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]` or `[v6]:port`; an empty host is this machine."""
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        is_valid = closed and (not port or port.startswith(":"))
        port = port[1:]
    else:
        host, _, port = text.partition(":")
        is_valid = True
    if not is_valid or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise BadRedisUrl("an address whose hosts are written as host or host:port")
    return unquote(host) or "localhost", int(port or default_port)


def _database(text: str) -> int:
    return _number(unquote(text)) if text else 0


def _number(text: str) -> int:
    if not text.isdecimal():
        raise BadRedisUrl("an address whose database is a number")
    return int(text)


def _boolean(text: str) -> bool:
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
    "ssl_check_hostname": _boolean,
}


def _query(text: str) -> dict[str, Any]:
    options = dict(parse_qsl(text, keep_blank_values=True))
    if not options.keys() <= _OPTIONS.keys():
        raise BadRedisUrl(f"an address with no other options than {', '.join(_OPTIONS)}")
    return {name: _OPTIONS[name](value) for name, value in options.items()}


def _refuse_sentinel_options(options: Mapping[str, Any]) -> None:
    if any(name.startswith("sentinel_") for name in options):
        raise BadRedisUrl("an address of Sentinels, redis+sentinel://, where it has options for them")
