"""What users import and type: `TokenStream`, `AsyncTokenStream`, `Client`; the command line; the supervisor.

The three classes are loaded on first use, so that importing the package loads no library.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.client.http import Client
    from tokenmill.client.streams import AsyncTokenStream, TokenStream

__all__ = ["AsyncTokenStream", "Client", "TokenStream"]

_MODULES = {
    "AsyncTokenStream": "tokenmill.client.streams",
    "Client": "tokenmill.client.http",
    "TokenStream": "tokenmill.client.streams",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
