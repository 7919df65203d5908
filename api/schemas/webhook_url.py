"""Checks the URLs of webhooks and decides which addresses are public.

Only URLs that every parser reads alike are accepted, so the checked host is the one that is called. An
address is public only if it is globally reachable.
"""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_CHARACTERS = 2048
PORTS = {"http": 80, "https": 443}
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*\.?")
#: Some resolvers read these as addresses: 2130706433, 0x7f.1, 127.1
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]+))(?::([0-9]{0,5}))?")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        # Relays and tunnels: they forward to any address.
        "192.88.99.0/24", "2001::/32", "2002::/16",
        # Reserved for documentation, but newer than some versions of `ipaddress`.
        "3fff::/20",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL. `host`: a name or an address without brackets. `path`: includes the query."""

    secure: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = PORTS["https" if self.secure else "http"]
        return host if self.port == usual else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Parse a plain http or https URL. Raises ValueError, which says what is wrong, for anything else."""
    if not _PRINTABLE.fullmatch(url):
        raise ValueError("must be printable ASCII without spaces; encode other characters")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"must be a URL: {error}") from None
    if parts.scheme not in PORTS:
        raise ValueError("must begin with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("must not contain a user or password")
    # `urlsplit().hostname` ignores text beside the brackets of an IPv6 address.
    found = _AUTHORITY.fullmatch(parts.netloc.lower())
    address, name, digits = found.groups() if found else (None, "", None)
    port = int(digits) if digits else PORTS[parts.scheme]
    if not (_is_address(address) if address else _NAME.fullmatch(name)) or not 1 <= port <= 65535:
        raise ValueError("must contain a valid host, and if it has a port, one from 1 to 65535")
    if name and _NUMBER.fullmatch(name) and not _is_ipv4(name):
        raise ValueError("must write an IPv4 address as four decimal numbers")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme == "https", address or name, port, path)


def is_public(host: str) -> bool:
    """Whether an address is public. True for a name, whose addresses are checked when it is resolved; only
    the names of this machine are not public.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.rstrip(".")
        return name != "localhost" and not name.endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return address in _GLOBAL_UNICAST and _is_global(address)
        address = address.ipv4_mapped
    return _is_global(address) and not address.is_multicast and not address.is_reserved


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not any(address in network for network in _NOT_PUBLIC)


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
