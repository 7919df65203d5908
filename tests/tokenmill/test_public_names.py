"""`from tokenmill import ...`: the names that users import, and what importing the package loads."""

import subprocess
import sys

import pytest

import tokenmill
from tokenmill.client.http import Client
from tokenmill.client.streams import AsyncTokenStream, TokenStream


def test_the_public_names_are_the_classes_of_the_client() -> None:
    assert tokenmill.Client is Client
    assert tokenmill.TokenStream is TokenStream
    assert tokenmill.AsyncTokenStream is AsyncTokenStream
    assert sorted(tokenmill.__all__) == ["AsyncTokenStream", "Client", "TokenStream"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        tokenmill.Engine  # noqa: B018


def test_importing_the_package_loads_no_library() -> None:
    code = "import sys, tokenmill; print({'redis', 'urllib.request', 'tokenmill.client'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
