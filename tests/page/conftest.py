"""The page of a live service with a tiny model, in headless Chromium."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.conftest import free_port
from tests.live_service import LiveService, http, wait_for
from tests.tiny_models import save_model

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
KEY = "key-of-the-page-0123456789"
PATIENCE_MILLISECONDS = 120_000
"""Of a step in the browser, on a loaded machine."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def service(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with LiveService(
        model_dir, tmp_path_factory.mktemp("service"), {"TOKENMILL_DTYPE": "float32"}
    ) as running:
        yield running


@pytest.fixture(scope="session")
def keyed_url(
    service: LiveService, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Another API of the same service, which asks for `KEY`."""
    env = {"TOKENMILL_API_KEYS": f"page:{KEY}"}
    keyed = LiveService(model_dir, tmp_path_factory.mktemp("keyed"), env, service.redis_url)
    keyed.start_api(free_port())
    try:
        wait_for(lambda: _answers(keyed.api_url), "the API with keys answers")
        yield keyed.api_url
    finally:
        keyed.kill()


def _answers(url: str) -> bool:
    try:
        return http("GET", f"{url}/livez").status == 200
    except OSError:
        return False


@contextmanager
def halted_worker(service: LiveService) -> Iterator[None]:
    """The worker does nothing inside, so that a task stays as it is."""
    os.killpg(service.worker.popen.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(service.worker.popen.pid, signal.SIGCONT)


@pytest.fixture
def open_page(browser: Browser, service: LiveService) -> Iterator["OpenPage"]:
    opened = OpenPage(browser, service.api_url)
    yield opened
    opened.close()


class OpenPage:
    """Opens the page in contexts of their own. A script error or a refused resource fails the test."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.url = url
        self.errors: list[str] = []

    def __call__(
        self,
        view: str = "chat",
        *,
        size: tuple[int, int] = (1440, 900),
        dark: bool = False,
        url: str | None = None,
    ) -> Page:
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"{url or self.url}/#/{view}")
        page.locator("main h2").first.wait_for()
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        assert self.errors == []
