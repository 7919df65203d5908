"""Where and as whom a client calls."""

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tokenmill.client.steps import Request

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "TOKENMILL_URL"
API_KEY_VARIABLE = "TOKENMILL_API_KEY"
_API_KEY = re.compile(r"[\x21-\x7e]+")
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Address:
    """Where and as whom a client calls. The key is never shown."""

    base_url: str
    api_key: str | None = field(repr=False)

    @classmethod
    def resolve(cls, base_url: str | None, api_key: str | None) -> "Address":
        """Values that are None come from the environment; an empty key is none.

        Raises ValueError, without the key.
        """
        url = base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        key = (os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key) or None
        _check_url(url)
        if key and not _API_KEY.fullmatch(key):
            raise ValueError("api_key must be printable ASCII without spaces")
        return cls(url.rstrip("/"), key)

    @property
    def http_options(self) -> dict[str, Any]:
        """Arguments of an httpx client of this address. Calls to this machine use no proxy."""
        return {
            "mounts": {f"all://{host}": None for host in _LOCAL_HOSTS},
            # As many calls at a time as the caller has threads or tasks.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        }

    def arguments(self, request: Request, timeout: float, stack: ExitStack) -> dict[str, Any]:
        """Arguments of `build_request` of an httpx client. `timeout`: seconds. `stack` closes files."""
        headers = {"X-Request-ID": request.request_id, "User-Agent": "tokenmill-client", **request.headers}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        arguments = {
            "method": request.method,
            "url": self.base_url + request.path,
            "params": dict(request.params) or None,
            "headers": headers,
            "json": request.json,
            "timeout": httpx.Timeout(timeout, read=timeout + request.timeout, pool=None),
        }
        if upload := request.upload:
            opened = stack.enter_context(upload.open())
            arguments |= {
                "data": upload.fields,
                "files": {"file": (upload.name, opened, "application/jsonl")},
            }
        return arguments


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        is_usable = False
    if not is_usable:
        raise ValueError(f"base_url must be an address that starts with http:// or https://, not {url!r}")
