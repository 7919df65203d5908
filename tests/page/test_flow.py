"""The flow view in a browser, with the steps of a real worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from tests.api.running_server import Server
from tests.live_service import wait_for
from tests.worker.fakes import MODEL, build_engine, submit
from tests.worker.running import Running, running

pytestmark = pytest.mark.services
FILES = Path(__file__).parents[2] / "api" / "page"
HTML = """<!doctype html><html lang="en"><title>Flow</title>
<meta name="viewport" content="width=device-width">
<style>body { color-scheme: light dark; font-family: sans-serif }</style><main><h1>Flow</h1></main></html>"""
MOUNT = """async () => {
  const { mount } = await import("/flow-files/flow.js");
  const follow = async (path, { signal, onEvent }) => {
    const reply = await fetch(`/${path}`, { signal });
    let text = "";
    for await (const part of reply.body.pipeThrough(new TextDecoderStream())) {
      text += part;
      for (let end; (end = text.indexOf("\\n\\n")) >= 0; text = text.slice(end + 2)) {
        const lines = text.slice(0, end).split("\\n");
        const fields = Object.fromEntries(lines.map((line) => line.split(/: (.*)/s)));
        if (fields.data) onEvent({ name: fields.event, data: JSON.parse(fields.data) });
      }
    }
  };
  const call = async (path, options) => (await fetch(`/${path}`, options)).json();
  const context = { fetch: call, follow, navigate: (hash) => { location.hash = hash; } };
  window.unmount = mount(document.querySelector("main"), context);
}"""


@pytest.fixture
def worker(redis_url: str) -> Iterator[Running]:
    with running(redis_url, build_engine(max_num_seqs=2)) as run:
        yield run


@pytest.fixture
def page(browser: Browser, redis_url: str, tmp_path: Path, worker: Running) -> Iterator[Page]:
    def serve(route: Route) -> None:
        route.fulfill(path=FILES / route.request.url.rpartition("/")[2])

    server = Server(redis_url, tmp_path, TOKENMILL_MODEL=MODEL)
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.route("**/flow-files/*", serve)
    page.route(f"{server.url}/", lambda route: route.fulfill(body=HTML, content_type="text/html"))
    page.goto(f"{server.url}/")
    wait_for(lambda: worker.worker.name in server.call("GET", "/v1/workers")[1].decode(), "a worker")
    page.evaluate(MOUNT)
    yield page
    page.close()
    server.close()


@pytest.fixture
def task_ids(page: Page, worker: Running, redis_client: "redis.Redis") -> set[str]:
    """Tasks whose steps the page shows."""
    while not worker.context.steps.is_watched:
        # Playwright answers intercepted requests only during its own calls.
        page.evaluate("() => new Promise(requestAnimationFrame)")
    ids = {submit(redis_client, sampling={"max_tokens": 40, "n": 4, "seed": 1}) for _ in range(12)}
    page.wait_for_function("() => Number(document.querySelector('.flow').dataset.steps) > 100")
    return ids


def place_of(page: Page, state: str, reason: str | None) -> int:
    """The index of a step with such a lane."""
    found: Any = page.evaluate(
        """([state, reason]) => window.tokenmillFlow.steps.findIndex(
             ({ lanes }) => lanes.some((lane) => lane.state === state && lane.reason === reason))""",
        [state, reason],
    )
    return int(found)


def test_steps_are_shown_and_can_be_scrubbed(page: Page, task_ids: set[str]) -> None:
    place = place_of(page, "waiting", "seq_budget")
    assert place >= 0
    page.get_by_role("slider").fill(str(place))
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    waiting = page.get_by_label("Waiting requests")
    expect(waiting).to_contain_text("all slots are taken")
    href = waiting.get_by_role("link").first.get_attribute("href")
    assert href is not None
    assert href.removeprefix("#/tasks/") in task_ids

    root = page.locator(".flow")
    before = int(root.get_attribute("data-step") or "")
    page.locator(".flow-lanes").press("ArrowRight")
    expect(root).to_have_attribute("data-step", str(before + 1))
    page.get_by_role("button", name="Resume").click()
    expect(root).to_have_attribute("data-paused", "false")


def test_a_decoding_lane_has_the_colour_of_the_legend(page: Page, task_ids: set[str]) -> None:
    assert task_ids
    page.get_by_role("slider").fill(str(place_of(page, "decode", None)))
    page.wait_for_function("() => !window.tokenmillFlow.frame")
    seen: Any = page.evaluate(
        """() => {
          const view = window.tokenmillFlow, step = view.steps[view.shown], canvas = view.lanes;
          const row = step.rows[step.lanes.findIndex((lane) => lane.state === "decode")];
          const high = canvas.height / view.numRows;
          const pen = canvas.getContext("2d");
          const data = pen.getImageData(canvas.width - 3, Math.floor((row + 0.5) * high), 1, 1).data;
          return [`rgb(${data[0]}, ${data[1]}, ${data[2]})`, view.colors.decode, view.colors.ground];
        }"""
    )
    assert seen[0] == seen[1] != seen[2]


def test_the_view_is_accessible_and_fits_a_phone(page: Page, task_ids: set[str]) -> None:
    assert task_ids
    assert Axe().run(page).violations_count == 0
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_unmounting_removes_the_view(page: Page, task_ids: set[str]) -> None:
    assert task_ids
    page.evaluate("() => window.unmount()")
    assert page.locator(".flow").count() == 0
    assert page.evaluate("() => window.tokenmillFlow === undefined")
