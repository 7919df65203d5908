"""The files of the page: types, headers, and names that reach nothing else."""

import hashlib
import re

import pytest

from api.routes.page import FILES
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import MakeApp
from tokenmill.settings.declarations import ApiSettings

VENDORED = {
    "vendor/uplot/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "vendor/uplot/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of the npm package uplot 1.6.32."""


def test_the_page_needs_no_key_and_loads_its_own_files_only(make_app: MakeApp, redis_url: str) -> None:
    client = client_of(make_app(ApiSettings(redis_url=redis_url, api_keys="a:key-of-tenant-a-0123456789")))
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    files = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(files) >= 5
    for name in files:
        # Relative, so that the page works below a prefix of a proxy.
        assert not name.startswith(("/", "http"))
        assert client.get(f"/{name}").status_code == 200, name


@pytest.mark.parametrize("file", sorted(FILES.rglob("*.js")), ids=lambda file: file.name)
def test_modules_import_files_that_exist_and_no_code_from_elsewhere(file: object) -> None:
    text = (FILES / str(file)).read_text()
    for name in re.findall(r'from "([^"]+)"', text):
        assert name.startswith("./")
        assert (FILES / name).is_file()
    # Text of a model is never HTML.
    if "vendor" not in str(file):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
        assert len(text.splitlines()) <= 450


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("page.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_types_and_headers(client: ApiClient, name: str, content_type: str) -> None:
    reply = client.get(f"/page/{name}")
    assert reply.headers["Content-Type"] == content_type
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    head = client.head(f"/page/{name}")
    assert (head.status_code, head.data) == (200, b"")
    again = client.get(f"/page/{name}", headers={"If-None-Match": reply.headers["ETag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/x.js", "/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/routes/page.py",
     "/page/vendor",
     "/page/vendor/uplot/LICENSE", "/page/x%00.js"],
)  # fmt: skip
def test_no_other_file_is_served(client: ApiClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_vendored_files_are_those_of_their_package() -> None:
    for name, digest in VENDORED.items():
        assert hashlib.sha256((FILES / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (FILES / "vendor/uplot/LICENSE").read_text()
