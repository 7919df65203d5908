"""The page in a browser: chat across reloads and restarts, tasks, health, keyboard, sizes, accessibility."""

import json
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.live_service import LiveService, http
from tests.page.conftest import KEY, PATIENCE_MILLISECONDS, OpenPage, halted_worker

pytestmark = pytest.mark.services
SIZES = [(390, 844), (820, 1180), (1440, 900)]
expect.set_options(timeout=PATIENCE_MILLISECONDS)


def ask(page: Page, text: str, *, max_tokens: int = 8) -> None:
    page.get_by_label("Longest answer, in tokens").fill(str(max_tokens))
    page.get_by_label(re.compile("^Message")).fill(text)
    page.get_by_role("button", name="Send").click()


def answered(page: Page) -> str:
    """The answer, once it has ended."""
    expect(page.locator(".details")).to_have_text(re.compile("^The answer"))
    return page.locator(".message.assistant .text").last.text_content() or ""


def text_of_task(service: LiveService, page: Page) -> str:
    href = page.locator(".message.assistant a").last.get_attribute("href") or ""
    task = http("GET", f"{service.api_url}/v1/tasks/{href.rsplit('/', 1)[1]}").json
    text: str = task["outputs"][0]["text"]
    return text


def same(shown: str, text: str) -> bool:
    """Equal but for white space, which a browser shows otherwise."""
    return shown.split() == text.split()


def test_an_answer_streams_and_can_be_asked_again(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    ask(page, "the quick brown fox")
    assert same(answered(page), text_of_task(service, page))
    page.get_by_role("button", name="Again").click()
    expect(page.locator(".message")).to_have_count(2)
    assert same(answered(page), text_of_task(service, page))


def test_a_reload_in_the_middle_of_an_answer_resumes_it(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    ask(page, "the quick brown fox", max_tokens=300)
    expect(page.locator(".details")).to_contain_text("tokens")
    page.reload()
    assert same(answered(page), text_of_task(service, page))
    page.reload()
    expect(page.locator(".message")).to_have_count(2)


def test_an_answer_is_stopped(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    with halted_worker(service):
        ask(page, "the quick brown fox", max_tokens=1000)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".details")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_an_answer_continues_when_the_api_is_back(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    with halted_worker(service):
        ask(page, "the quick brown fox", max_tokens=40)
        expect(page.locator(".message.assistant")).to_have_count(1)
        assert service.api is not None
        service.api.kill()
        expect(page.locator(".details")).to_contain_text("continues when it is back")
        service.restart_api()
    assert same(answered(page), text_of_task(service, page))


def test_output_is_never_read_as_html(open_page: OpenPage) -> None:
    page = open_page()
    hostile = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
    ask(page, hostile)
    answered(page)
    expect(page.locator(".message.user .text")).to_have_text(hostile)
    page.locator(".message.assistant a").click()
    page.locator(".timeline").wait_for()
    assert page.locator("main img, main b").count() == 0
    assert page.title() == "Tasks · Tokenmill"


def test_probabilities_are_shown_on_focus(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_label("Probabilities of the tokens").check()
    ask(page, "the quick brown fox")
    answered(page)
    page.locator(".token").first.focus()
    expect(page.locator(".about")).to_contain_text("Likeliest")


def test_tasks_are_listed_shown_and_deleted(open_page: OpenPage, service: LiveService) -> None:
    body = {"prompt": "the quick brown fox", "max_tokens": 4, "metadata": {"order": 7}}
    task = http("POST", f"{service.api_url}/v1/tasks", body, {"Prefer": "wait=60"}).json
    page = open_page("tasks")
    page.get_by_label("Status").select_option("completed")
    page.locator(f"a[href='#/tasks/{task['id']}']").click()
    page.locator(".timeline").wait_for()
    shown = page.locator("main").inner_text()
    assert "the quick brown fox" in shown
    assert json.dumps({"order": 7}, separators=(",", ":")) in shown
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("main h2")).to_have_text("Tasks")
    page.goto(f"{open_page.url}/#/tasks/{task['id']}")
    expect(page.locator(".error")).to_contain_text("no such task")


def test_a_waiting_task_is_cancelled(open_page: OpenPage, service: LiveService) -> None:
    with halted_worker(service):
        task_id = service.submit(prompt="the quick brown fox")
        page = open_page(f"tasks/{task_id}")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator(".status")).to_have_text("cancelled")


def test_health_shows_queue_workers_and_charts(open_page: OpenPage) -> None:
    page = open_page("health")
    expect(page.locator(".numbers")).to_contain_text("Ready workers")
    expect(page.locator("tbody tr")).to_contain_text("ready")
    expect(page.locator(".chart canvas")).to_have_count(3)
    expect(page.locator(".chart p").first).to_contain_text("waiting: 0")
    sizes = page.locator(".chart").evaluate_all(
        "charts => charts.map(chart => [chart.clientWidth, chart.querySelector('canvas').clientWidth])"
    )
    assert all(canvas <= chart for chart, canvas in sizes)


def test_a_key_is_asked_for_and_a_wrong_one_is_refused(open_page: OpenPage, keyed_url: str) -> None:
    page = open_page("tasks", url=keyed_url)
    page.get_by_role("textbox", name="API key").fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key-reason")).to_contain_text("refused")
    page.get_by_role("textbox", name="API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("main [role=status]")).to_contain_text("No tasks")
    page.reload()
    expect(page.locator("main [role=status]")).to_contain_text("No tasks")
    assert KEY not in page.content()


def test_the_keyboard_alone_is_enough(open_page: OpenPage) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    for name in ("Chat", "Tasks", "Flow", "Health"):
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text(name)
    page.keyboard.press("Enter")
    expect(page.locator("main h2")).to_have_text("Health")
    page.goto(f"{open_page.url}/#/chat")
    page.get_by_label(re.compile("^Message")).focus()
    page.keyboard.type("the quick brown fox")
    page.keyboard.press("Enter")
    answered(page)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(320, 640), *SIZES], ids=str)
def test_every_view_fits_and_is_accessible(
    open_page: OpenPage, service: LiveService, size: tuple[int, int], dark: bool
) -> None:
    body = {"prompt": "the quick brown fox", "max_tokens": 4}
    task = http("POST", f"{service.api_url}/v1/tasks", body, {"Prefer": "wait=60"}).json
    page = open_page(size=size, dark=dark)
    for view, ready in (
        ("chat", ".composer"),
        ("tasks", "tbody tr"),
        (f"tasks/{task['id']}", ".timeline"),
        ("flow", ".flow[data-steps]"),
        ("health", "tbody tr"),
    ):
        page.goto(f"{open_page.url}/#/{view}")
        page.locator(ready).first.wait_for()
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= size[0], f"{view} is {width} wide"
        found = Axe().run(page).response["violations"]
        serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
        assert serious == [], view
