"""Flask's test client with JSON replies that tests can index without a cast."""

from typing import TYPE_CHECKING, Any, cast

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse


class ApiReply(TestResponse):
    """A reply whose `json` has any shape."""

    if TYPE_CHECKING:

        @property
        def json(self) -> Any: ...


class ApiClient(FlaskClient):
    """The methods of `FlaskClient` that return an `ApiReply`."""

    if TYPE_CHECKING:

        def open(self, *args: Any, **options: Any) -> ApiReply: ...
        def get(self, *args: Any, **options: Any) -> ApiReply: ...
        def head(self, *args: Any, **options: Any) -> ApiReply: ...
        def post(self, *args: Any, **options: Any) -> ApiReply: ...
        def put(self, *args: Any, **options: Any) -> ApiReply: ...
        def delete(self, *args: Any, **options: Any) -> ApiReply: ...
        def options(self, *args: Any, **options: Any) -> ApiReply: ...


def client_of(app: Flask) -> ApiClient:
    """A test client of `app`."""
    return cast(ApiClient, app.test_client())
