"""`from tokenmill import ...`: the names that users import, and what importing the package loads."""

import subprocess
import sys

import pytest

import tokenmill
import tokenmill.client
from tokenmill.client.async_client import AsyncClient
from tokenmill.client.streams import AsyncTokenStream, TokenStream
from tokenmill.client.sync_client import Client


def test_the_public_names_are_the_classes_of_the_client() -> None:
    assert tokenmill.Client is Client
    assert tokenmill.AsyncClient is AsyncClient
    assert tokenmill.TokenStream is TokenStream
    assert tokenmill.AsyncTokenStream is AsyncTokenStream
    assert sorted(tokenmill.__all__) == ["AsyncClient", "AsyncTokenStream", "Client", "TokenStream"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        tokenmill.Engine  # noqa: B018


def test_importing_the_package_loads_no_library() -> None:
    code = "import sys, tokenmill; print({'redis', 'httpx', 'tokenmill.client'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_name_of_the_client_package_can_be_imported() -> None:
    assert [name for name in tokenmill.client.__all__ if getattr(tokenmill.client, name) is None] == []
    assert set(tokenmill.client.__all__) == set(tokenmill.client._MODULES)


def test_importing_the_client_package_loads_no_library() -> None:
    code = "import sys, tokenmill.client; print({'redis', 'httpx', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
