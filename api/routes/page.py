"""The page at `/` and its files: a chat, the tasks and the state of the service.

The files hold no data and need no API key; the page's own calls send one.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path

from flask import Blueprint, Response, request
from werkzeug.exceptions import NotFound

FILES = Path(__file__).parents[1] / "page"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Fixed here: the types that the operating system knows differ."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser asks each time, and the ETag spares the transfer: a new version is seen at once.
    "Cache-Control": "no-cache",
}


def page_routes() -> Blueprint:
    """The blueprint of `/` and `/page/...`. OpenAPI does not list it."""
    routes = Blueprint("page", __name__)

    @routes.get("/")
    def index() -> Response:
        return _file("index.html")

    @routes.get("/page/<path:name>")
    def file(name: str) -> Response:
        return _file(name)

    return routes


@cache
def _files() -> dict[str, bytes]:
    """All files by their names below `FILES`, about 100 KB. No other file can be reached."""
    found = (path for path in FILES.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FILES).as_posix(): path.read_bytes() for path in found}


def _file(name: str) -> Response:
    """Raises `NotFound`."""
    content = _files().get(name)
    if content is None:
        raise NotFound
    response = Response(content, content_type=TYPES[Path(name).suffix], headers=HEADERS)
    response.set_etag(sha256(content).hexdigest()[:32])
    response.make_conditional(request)
    return response
