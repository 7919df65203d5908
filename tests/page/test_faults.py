"""The page under faults: hostile text, damaged storage, lost connections, refused keys, impatient users."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from playwright.sync_api import Page, Route, expect

from tests.live_service import LiveService, wait_for
from tests.page.conftest import KEY, OpenPage, halted_worker
from tests.page.test_page import answered, ask

pytestmark = pytest.mark.services
HOSTILE = (
    "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    "\u2028</li>\nid: 9\ndata: {}\n\n\x1b[31m \u202eevil"
)
"""HTML, fields of event streams, a terminal's escape, a line end of JavaScript, text from right to left."""
PROMPT = "the quick brown fox"


def keep(page: Page, task_id: str) -> None:
    """Reload the page as it was left in the middle of the answer of `task_id`."""
    messages = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "", "task": task_id},
    ]
    page.evaluate(
        "saved => localStorage.setItem('tokenmill.chat', saved)", json.dumps({"messages": messages})
    )
    page.reload()


def completed(service: LiveService, **fields: object) -> str:
    task_id = service.submit(**{"prompt": PROMPT, "max_tokens": 4, **fields})
    assert service.wait_task(task_id)["status"] == "completed"
    return task_id


def test_hostile_output_is_shown_letter_by_letter(open_page: OpenPage, service: LiveService) -> None:
    forced = {"choice": [HOSTILE]}
    page = open_page()
    keep(page, completed(service, max_tokens=600, structured_outputs=forced, logprobs=1))
    answered(page)
    assert page.locator(".assistant .text").evaluate("element => element.textContent") == HOSTILE
    page.get_by_role("link", name="Task", exact=True).click()
    page.locator(".timeline").wait_for()
    texts = page.locator("main pre").evaluate_all("elements => elements.map(one => one.textContent)")
    assert HOSTILE in texts
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "Tasks · Tokenmill"


@pytest.mark.parametrize(
    "saved", ["{", "5", "null", '{"messages": [5, null, {"role": "x"}], "parameters": 7}']
)
def test_a_damaged_conversation_does_not_break_the_chat(open_page: OpenPage, saved: str) -> None:
    page = open_page()
    page.evaluate("saved => localStorage.setItem('tokenmill.chat', saved)", saved)
    page.reload()
    ask(page, PROMPT)
    answered(page)


def test_a_full_storage_is_reported_and_the_chat_goes_on(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') } }"
    )
    ask(page, PROMPT)
    answered(page)
    expect(page.locator(".details")).to_contain_text("cannot keep the conversation")


def test_the_answer_of_a_deleted_task_ends(open_page: OpenPage, service: LiveService) -> None:
    task_id = completed(service)
    assert service.call("DELETE", f"/v1/tasks/{task_id}").status == 204
    page = open_page()
    keep(page, task_id)
    expect(page.locator(".message .error")).to_contain_text("no such task")
    page.reload()
    expect(page.locator(".message .error")).to_contain_text("no such task")
    ask(page, PROMPT)
    answered(page)


def test_a_message_sent_while_the_api_is_away_is_sent_once(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    page.get_by_label("Longest answer, in tokens").fill("8")
    before = len(service.call("GET", "/v1/tasks?limit=100").json["data"])
    assert service.api is not None
    service.api.kill()
    try:
        ask(page, PROMPT)
        expect(page.locator(".details")).to_contain_text("sent when it is back")
    finally:
        service.restart_api()
        wait_for(service.api.is_ready, "the API is back")
    answered(page)
    assert len(service.call("GET", "/v1/tasks?limit=100").json["data"]) == before + 1


def test_a_lost_reply_and_a_reload_start_one_task(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    accepted: list[str] = []

    def lose(route: Route) -> None:
        accepted.append(route.fetch().json()["id"])
        route.abort()

    page.route("**/v1/tasks", lose, times=1)
    page.get_by_label("Longest answer, in tokens").fill("8")
    ask(page, PROMPT)
    expect(page.locator(".details")).to_contain_text("sent when it is back")
    page.reload()
    answered(page)
    assert page.locator(".message.assistant a").get_attribute("href") == f"#/tasks/{accepted[0]}"


def test_a_request_under_way_cannot_be_sent_twice_and_can_be_stopped(
    open_page: OpenPage, service: LiveService
) -> None:
    page = open_page()
    held: list[Route] = []
    page.route("**/v1/tasks", lambda route: held.append(route))
    with halted_worker(service):
        ask(page, "one", max_tokens=1000)
        page.get_by_label(re.compile("^Message")).fill("two")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".details")).to_contain_text("Stops as soon as")
        assert len(held) == 1
        expect(page.get_by_label(re.compile("^Message"))).to_have_value("two")
        held[0].continue_()
        expect(page.locator(".details")).to_contain_text("stopped")


def test_a_new_chat_cancels_the_answer_under_way(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    with halted_worker(service):
        ask(page, PROMPT, max_tokens=1000)
        href = page.locator(".message.assistant a").get_attribute("href") or ""
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        expect(page.locator(".details")).to_contain_text("Write a message to start")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert service.wait_task(href.rpartition("/")[2])["status"] == "cancelled"


def test_a_silent_connection_is_opened_again(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    page.clock.install()
    assert service.api is not None
    with halted_worker(service):
        ask(page, PROMPT, max_tokens=40)
        expect(page.locator(".message.assistant")).to_have_count(1)
        # Halted, the API keeps its connections and says nothing, as a network that is gone.
        os.killpg(service.api.popen.pid, signal.SIGSTOP)
        try:
            with page.expect_request("**/events"):
                page.clock.run_for(40_000)
        finally:
            os.killpg(service.api.popen.pid, signal.SIGCONT)
        page.clock.resume()
    answered(page)


def test_the_skip_link_keeps_the_view(open_page: OpenPage) -> None:
    page = open_page("tasks")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.locator("main h2")).to_have_text("Tasks")
    page.goto(f"{open_page.url}/#/toString")
    expect(page.locator("main h2")).to_have_text("Chat")


def test_a_view_that_is_opened_gets_the_focus(open_page: OpenPage) -> None:
    page = open_page("tasks")
    page.get_by_role("link", name="Health").click()
    expect(page.locator("main")).to_be_focused()


def test_tokens_are_one_stop_of_the_keyboard(open_page: OpenPage, service: LiveService) -> None:
    page = open_page()
    keep(
        page,
        completed(
            service, max_tokens=40, logprobs=2, min_tokens=40, structured_outputs={"choice": ["abcdefgh" * 5]}
        ),
    )
    answered(page)
    assert page.locator(".token").count() > 4
    assert page.locator(".token[tabindex='0']").count() == 1
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator(".token").last).to_be_focused()
    expect(page.locator("[role=status].unseen")).to_contain_text("Likeliest")
    # The pointer does not hide what became of the answer.
    page.locator(".token").first.hover()
    expect(page.locator(".about")).to_contain_text("Likeliest")
    expect(page.locator(".details")).to_contain_text("The answer")
    page.keyboard.press("Tab")
    expect(page.get_by_label(re.compile("^Message"))).to_be_focused()


@pytest.mark.parametrize("language", ["curl", "Python"])
def test_a_copied_request_runs_without_the_clipboard_too(
    open_page: OpenPage, service: LiveService, language: str
) -> None:
    page = open_page()
    page.evaluate("() => Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.get_by_role("button", name=f"Copy as {language}").click()
    expect(page.locator(".details")).to_contain_text("Write a message first")
    page.get_by_label("Temperature").fill("0")
    ask(page, 'it\'s "quoted" $HOME `id` \\ \u2028 é')
    answered(page)
    page.get_by_role("button", name=f"Copy as {language}").click()
    shown = page.get_by_label("The request as a command")
    expect(shown).to_be_focused()
    expect(page.locator(".details")).to_contain_text("The text is selected")
    text = shown.input_value()
    command = ["bash", "-c", text] if language == "curl" else [sys.executable, "-W", "error", "-c", text]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    href = page.locator(".message.assistant a").get_attribute("href") or ""
    expected = service.task(href.rpartition("/")[2])["outputs"][0]["text"]
    assert (json.loads(output)["outputs"][0]["text"] if language == "curl" else output) == expected


def test_a_key_can_be_declined_and_corrected(open_page: OpenPage, keyed_url: str) -> None:
    page = open_page("health", url=keyed_url)
    page.keyboard.press("Escape")
    expect(page.locator("main .error")).to_contain_text("needs an API key")
    expect(page.locator("dialog")).to_be_hidden()
    page.get_by_role("link", name="Tasks").click()
    field = page.get_by_role("textbox", name="API key")
    field.fill("ключ")
    page.keyboard.press("Enter")
    expect(page.locator("#key-reason")).to_contain_text("special characters")
    field.fill(f" {KEY} ")
    page.keyboard.press("Enter")
    expect(page.locator("main [role=status]")).to_have_text("No tasks.")


def test_health_works_where_a_proxy_keeps_the_metrics(open_page: OpenPage) -> None:
    page = open_page("chat")
    page.route("**/metrics", lambda route: route.fulfill(status=403))
    page.goto(f"{open_page.url}/#/health")
    expect(page.locator("tbody tr")).to_contain_text("ready")
    expect(page.locator(".chart p").first).to_contain_text("waiting: 0")
    expect(page.locator("main .error")).to_have_text("")


def test_charts_follow_a_change_to_dark(open_page: OpenPage) -> None:
    page = open_page("health")
    expect(page.locator(".chart p").first).to_contain_text("waiting: 0")
    colours = """() => {
      const canvas = document.querySelector('.chart canvas');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const found = new Set();
      for (let at = 0; at < data.length; at += 4) {
        if (data[at + 3] === 255) found.add(data.slice(at, at + 3).join(' '));
      }
      return [...found];
    }"""
    line = "58 65 77"  # --line in the dark, the colour of the grid.
    assert line not in page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    wait_for(lambda: line in page.evaluate(colours), "the chart is dark")


def test_a_seed_of_64_bits_is_shown_exactly(open_page: OpenPage, service: LiveService) -> None:
    seed = 8862104514175079917
    page = open_page(f"tasks/{completed(service, seed=seed, metadata={'number': seed - 2})}")
    page.locator(".timeline").wait_for()
    shown = page.locator("main").inner_text()
    assert f'"seed": {seed}' in shown
    assert f'{{"number":{seed - 2}}}' in shown


def test_a_lost_connection_is_forgotten_once_the_task_is_read(
    open_page: OpenPage, service: LiveService
) -> None:
    with halted_worker(service):
        page = open_page("chat")
        page.route("**/v1/tasks/*", lambda route: route.abort(), times=1)
        page.goto(f"{open_page.url}/#/tasks/{service.submit(prompt=PROMPT)}")
        expect(page.locator("main [role=status]")).to_contain_text("does not answer")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator(".status")).to_have_text("cancelled")
        expect(page.locator("main [role=status]")).to_have_text("")


def test_a_late_reply_does_not_replace_a_newer_choice(open_page: OpenPage, service: LiveService) -> None:
    completed(service)
    page = open_page("chat")
    held: list[Route] = []
    page.route("**/v1/tasks?limit=20", lambda route: held.append(route))
    page.goto(f"{open_page.url}/#/tasks")
    page.get_by_label("Status").select_option("queued")
    expect(page.locator("main [role=status]")).to_have_text("No tasks.")
    assert len(held) == 1
    # The page has given the first call up, so that its reply has no reader.
    assert held[0].request.failure == "net::ERR_ABORTED"


@pytest.mark.parametrize("view", ["chat", "tasks", "task", "flow", "health"])
def test_everything_to_press_on_a_phone_has_44_pixels(
    open_page: OpenPage, service: LiveService, view: str
) -> None:
    task_id = completed(service)
    page = open_page(size=(320, 640))
    keep(page, task_id)
    answered(page)
    page.goto(f"{open_page.url}/#/{f'tasks/{task_id}' if view == 'task' else view}")
    ready = {
        "chat": ".message",
        "tasks": "tbody tr",
        "task": ".timeline",
        "flow": ".flow",
        "health": "tbody tr",
    }
    page.locator(ready[view]).first.wait_for()
    small = page.evaluate(
        """() => [...document.querySelectorAll('a:not(.skip), button, select, textarea, input, label.inline')]
          .filter((one) => one.checkVisibility() && !one.closest('label.inline > *'))
          .map((one) => [one.textContent || one.name, one.getBoundingClientRect().height])
          .filter(([, height]) => height < 44)"""
    )
    assert small == []


def test_a_long_answer_stays_in_sight(open_page: OpenPage, service: LiveService) -> None:
    text = "a line\n" * 80
    page = open_page()
    keep(page, completed(service, max_tokens=1000, structured_outputs={"choice": [text + "end"]}))
    answered(page)
    in_sight = """() => document.querySelector('.messages').getBoundingClientRect().bottom
      <= document.querySelector('.composer').getBoundingClientRect().top + 1"""
    page.wait_for_function(in_sight)
    assert page.evaluate("() => scrollY") > 0
