"""What users import and type: the clients, the token streams, the command line, the supervisor.

The four classes are loaded on first use, so that importing the package loads no library.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.client.async_client import AsyncClient
    from tokenmill.client.streams import AsyncTokenStream, TokenStream
    from tokenmill.client.sync_client import Client

__all__ = ["AsyncClient", "AsyncTokenStream", "Client", "TokenStream"]

_MODULES = {
    "AsyncClient": "tokenmill.client.async_client",
    "AsyncTokenStream": "tokenmill.client.streams",
    "Client": "tokenmill.client.sync_client",
    "TokenStream": "tokenmill.client.streams",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
