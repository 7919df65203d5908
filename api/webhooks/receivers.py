"""Limits how many deliveries of webhooks one receiver or one tenant occupies at once.

Invariants: callers are counted by address, so that many names of one receiver count as one. A receiver that
does not answer, or has not answered yet, occupies a few deliveries only; one that answers, not all of them. A
tenant occupies at most its limit. Knows no webhook.
"""

import ipaddress
import threading
from collections import Counter
from collections.abc import Sequence

MAX_IN_VAIN = 4
"""Callers of an address that has not answered its last call, or was never called."""
MAX_CALLERS = 12
"""Callers of an address that answers."""
MAX_REMEMBERED = 10_000
_IPV6_PREFIX = 64
"""One network of an IPv6 host counts as one address."""


class Receivers:
    """The calls of one process, for any number of threads. `max_per_tenant`: deliveries of one tenant."""

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._lock = threading.Lock()
        self._callers: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._answering: dict[str, None] = {}
        self._silent: dict[str, None] = {}

    def enter_tenant(self, tenant: str) -> bool:
        """Whether one more delivery of `tenant` may begin; then `leave_tenant` must follow."""
        with self._lock:
            if self._tenants[tenant] >= self._max_per_tenant:
                return False
            self._tenants[tenant] += 1
            return True

    def leave_tenant(self, tenant: str) -> None:
        with self._lock:
            self._release(self._tenants, tenant)

    def enter(self, addresses: Sequence[str]) -> bool:
        """Whether one more may call, by all addresses of its name; then `leave` must follow."""
        networks = {_network(address) for address in addresses}
        with self._lock:
            for network in networks:
                limit = MAX_CALLERS if network in self._answering else MAX_IN_VAIN
                if self._callers[network] >= limit:
                    return False
            self._callers.update(networks)
            return True

    def leave(self, addresses: Sequence[str], *, answered: bool) -> None:
        networks = {_network(address) for address in addresses}
        with self._lock:
            now, before = (self._answering, self._silent) if answered else (self._silent, self._answering)
            for network in networks:
                self._release(self._callers, network)
                before.pop(network, None)
                # Put in anew, so that those that were called longest ago are forgotten first.
                now.pop(network, None)
                now[network] = None
            while len(now) > MAX_REMEMBERED:
                del now[next(iter(now))]

    def is_silent(self, addresses: Sequence[str]) -> bool:
        """Whether an address did not answer its last call."""
        with self._lock:
            return any(_network(address) in self._silent for address in addresses)

    @staticmethod
    def _release(counts: Counter[str], name: str) -> None:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
