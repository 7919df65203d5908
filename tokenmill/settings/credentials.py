"""Parses API keys and webhook secrets.

API keys are kept only as digests, and are neither logged nor shown. A request's key is compared with all of
them in constant time.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_KEYS = "entries `tenant:key`, separated by commas, spaces or lines; a line that begins with # is a comment"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix, not a secret
SECRET_BYTES = range(24, 65)
_SECRETS = (
    f"{SECRET_PREFIX} and the base64 of {SECRET_BYTES[0]} to {SECRET_BYTES[-1]} bytes; several, separated by"
    " spaces"
)


@dataclass(frozen=True, slots=True)
class Keyring:
    """Pairs of a key's digest and its tenant. Without entries, requests need no key."""

    entries: Sequence[tuple[bytes, str]] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def has_several_tenants(self) -> bool:
        return len({tenant for _, tenant in self.entries}) > 1

    def tenant_of(self, key: str) -> str | None:
        """The tenant of a key; None if the key is unknown."""
        digest, found = _digest(key), None
        for known, tenant in self.entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


NO_KEYS = Keyring()


def parse_keys(text: str, known: Keyring = NO_KEYS) -> Keyring:
    """The keys of `text` added to the `known` ones.

    Raises ValueError, which names the wrong entry by its number and repeats none. A text without entries is
    an error: the service would be open to all.
    """
    tenants, number = dict(known.entries), 0
    for number, entry in enumerate(_entries(text), 1):
        tenant, _, key = entry.partition(":")
        if not _TENANT.fullmatch(tenant) or not _KEY.fullmatch(key):
            raise ValueError(f"{_KEYS}; entry {number} is malformed")
        if tenants.setdefault(_digest(key), tenant) != tenant:
            raise ValueError(f"{_KEYS}; the key of entry {number} belongs to another tenant too")
    if not number:
        raise ValueError(f"{_KEYS}; there are no entries")
    return Keyring(tuple(tenants.items()))


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """The signing keys of one `whsec_...` secret, or of several separated by spaces. Raises ValueError."""
    return tuple(_signing_key(secret) for secret in text.split())


def _entries(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            yield from line.replace(",", " ").split()


def _digest(key: str) -> bytes:
    """A fast hash is enough: keys are long and random, so they cannot be guessed from their digests."""
    return hashlib.sha256(key.encode()).digest()


def _signing_key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or len(key) not in SECRET_BYTES:
        raise ValueError(_SECRETS)
    return key
