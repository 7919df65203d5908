"""Limits how many concurrent deliveries one receiver or one tenant occupies.

Deliveries are counted by address, so that several names of one receiver count as one. A receiver that has
not answered its last call, or was never called, gets fewer than one that answers.
"""

import threading
from collections import Counter
from collections.abc import Sequence

from api.networks import network_of

MAX_UNPROVEN = 4
"""Concurrent deliveries to an address that did not answer its last call, or was never called."""
MAX_ANSWERING = 12
"""Concurrent deliveries to an address that answers."""
MAX_REMEMBERED = 10_000
"""Addresses of either kind whose last outcome is kept."""


class ReceiverLimits:
    """Counts the deliveries of one process, for any number of threads.

    `max_per_tenant`: concurrent deliveries of one tenant.
    """

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._lock = threading.Lock()
        self._by_network: Counter[str] = Counter()
        self._by_tenant: Counter[str] = Counter()
        # In the order of their last call: dictionaries serve as ordered sets.
        self._answering: dict[str, None] = {}
        self._silent: dict[str, None] = {}

    def enter_tenant(self, tenant: str) -> bool:
        """Count a delivery of `tenant`, unless it is at its limit. If true, call `leave_tenant` later."""
        with self._lock:
            if self._by_tenant[tenant] >= self._max_per_tenant:
                return False
            self._by_tenant[tenant] += 1
            return True

    def leave_tenant(self, tenant: str) -> None:
        with self._lock:
            _decrement(self._by_tenant, tenant)

    def enter(self, addresses: Sequence[str]) -> bool:
        """Count one more delivery to a name with these addresses unless one of them is at its limit. If
        true, call `leave` later.
        """
        networks = {network_of(address) for address in addresses}
        with self._lock:
            for network in networks:
                limit = MAX_ANSWERING if network in self._answering else MAX_UNPROVEN
                if self._by_network[network] >= limit:
                    return False
            self._by_network.update(networks)
            return True

    def leave(self, addresses: Sequence[str], *, answered: bool) -> None:
        networks = {network_of(address) for address in addresses}
        with self._lock:
            now, before = (self._answering, self._silent) if answered else (self._silent, self._answering)
            for network in networks:
                _decrement(self._by_network, network)
                before.pop(network, None)
                # Insert at the end, so that the address called longest ago is dropped first.
                now.pop(network, None)
                now[network] = None
            while len(now) > MAX_REMEMBERED:
                del now[next(iter(now))]

    def is_silent(self, addresses: Sequence[str]) -> bool:
        """Whether one of the addresses did not answer its last call."""
        with self._lock:
            return any(network_of(address) in self._silent for address in addresses)

    @property
    def num_in_progress(self) -> int:
        """Addresses and tenants that have a delivery in progress."""
        with self._lock:
            return len(self._by_network) + len(self._by_tenant)


def _decrement(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
