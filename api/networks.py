"""Counts the IP addresses of one host as one."""

import ipaddress

_IPV6_PREFIX = 64
"""One host may hold all addresses of an IPv6 network of this length."""


def network_of(address: str) -> str:
    """The address itself for IPv4, its network for IPv6, and the text itself for anything else."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
