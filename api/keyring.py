"""The API keys that this service knows, and whose they are. Pure.

Law: no key is kept, shown or told as it was given. What is kept are digests, and each call's key is compared
with all of them, so that the time of an answer tells nothing about any. Knows no request.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WANTED = "entries `tenant:key`, separated by commas, spaces or lines; a line that begins with # is a comment"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class Keyring:
    """Digests of keys, each with its tenant; a tenant may have several. Empty: nobody needs a key."""

    entries: Sequence[tuple[bytes, str]] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def has_several_tenants(self) -> bool:
        return len({tenant for _, tenant in self.entries}) > 1

    def tenant_of(self, key: str) -> str | None:
        """None: not a key of this service."""
        shown, found = _digest(key), None
        for digest, tenant in self.entries:
            if hmac.compare_digest(digest, shown):
                found = tenant
        return found


NO_KEYS = Keyring()


def parse_keys(text: str, known: Keyring = NO_KEYS) -> Keyring:
    """Those of `text` and the `known` ones. Raises ValueError, which says which entry is wrong and repeats
    none. A text without entries is wrong: the service would stand open.
    """
    tenants, number = dict(known.entries), 0
    for number, entry in enumerate(_entries(text), 1):
        tenant, _, key = entry.partition(":")
        if not _TENANT.fullmatch(tenant) or not _KEY.fullmatch(key):
            raise ValueError(f"{WANTED}; entry {number} is none")
        if tenants.setdefault(_digest(key), tenant) != tenant:
            raise ValueError(f"{WANTED}; the key of entry {number} is another tenant's too")
    if not number:
        raise ValueError(f"{WANTED}; there is none")
    return Keyring(tuple(tenants.items()))


def _entries(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            yield from line.replace(",", " ").split()


def _digest(key: str) -> bytes:
    """Keys are long and random, so that nothing slower is needed to keep them from being guessed."""
    return hashlib.sha256(key.encode()).digest()
