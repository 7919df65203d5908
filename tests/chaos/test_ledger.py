"""The ledger detects each kind of problem."""

from dataclasses import replace

import pytest

from tests.chaos.ledger import Account, Kind, audit
from tests.chaos.readers import Reading
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent

LENGTH = 4


def token(seq: int, token_id: int | None = None) -> TokenEvent:
    return TokenEvent(id="t", seq=seq, token=seq if token_id is None else token_id, text="x")


def end(seq: int, reason: str = "length", tokens: int = LENGTH) -> FinishedEvent:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
    return FinishedEvent(id="t", seq=seq, text="", finish_reason=reason, done=True, usage=usage)


EVENTS: tuple[Event, ...] = (*map(token, range(LENGTH)), end(LENGTH))
READ = Reading(seqs=list(range(LENGTH + 1)), ended=True)
GOOD = Account(
    name="request 1",
    task_ids=("t", "t"),
    status="completed",
    may_be=frozenset({"completed"}),
    events=EVENTS,
    num_results=1,
    reading=READ,
)
CANCELLED = replace(
    GOOD,
    status="cancelled",
    may_be=frozenset({"completed", "cancelled"}),
    events=(*map(token, range(2)), end(2, "cancelled", 2)),
    num_results=0,
    reading=Reading(seqs=[0, 1, 2], statuses=["cancelled", "cancelled"], ended=True),
)
POLLED = replace(
    GOOD, reading=Reading(polls=[[], [0, 1], [0, 1], [0, 1, 2, 3]], statuses=["completed"], ended=True)
)


SEVERAL = replace(
    POLLED,
    events=(
        token(0),
        TokenEvent(id="t", seq=1, token=9, text="x", index=1),
        FinishedEvent(id="t", seq=2, text="", finish_reason="stop", index=1),
        token(3, 1),
        token(4, 2),
        token(5, 3),
        end(6, tokens=5),
    ),
)


DELIVERED_TWICE = replace(GOOD, webhooks=("completed", "completed"))


@pytest.mark.parametrize("account", [GOOD, CANCELLED, POLLED, SEVERAL, DELIVERED_TWICE])
def test_correct_accounts_have_no_problem(account: Account) -> None:
    assert audit([account]) == []


def read(*seqs: int, ended: bool = True) -> Account:
    return replace(GOOD, reading=Reading(seqs=list(seqs), ended=ended))


def logged(*events: Event) -> Account:
    return replace(GOOD, events=events, reading=Reading(seqs=[event.seq for event in events], ended=True))


def polled(*polls: list[int]) -> Account:
    return replace(GOOD, reading=Reading(polls=list(polls), ended=True))


@pytest.mark.parametrize(
    ("kind", "text", "account"),
    [
        ("lost", "nothing is stored", replace(GOOD, status=None, events=())),
        ("stuck", "still in_progress", replace(GOOD, status="in_progress")),
        ("stuck", "waited for an answer", replace(GOOD, timed_out=True)),
        ("doubled", "2 tasks", replace(GOOD, task_ids=("t", "u"))),
        ("lost", "ended as failed", replace(GOOD, status="failed", events=(*EVENTS[:-1], end(4, "error")))),
        ("lost", "ended as cancelled", replace(CANCELLED, may_be=frozenset({"completed"}))),
        ("doubled", "ends with error", logged(*EVENTS[:-1], end(4, "error"))),
        ("doubled", "reported as cancelled", replace(GOOD, reading=replace(READ, statuses=["cancelled"]))),
        ("lost", "0 results", replace(GOOD, num_results=0)),
        ("doubled", "2 results", replace(GOOD, num_results=2)),
        ("doubled", "1 results", replace(CANCELLED, num_results=1)),
        ("lost", "webhook never arrived", replace(GOOD, webhooks=())),
        ("doubled", "reported cancelled", replace(GOOD, webhooks=("completed", "cancelled"))),
        # The log.
        ("lost", "0 terminal messages", logged(*EVENTS[:-1])),
        ("lost", "log lacks messages [2]", logged(*EVENTS[:2], *EVENTS[3:])),
        ("doubled", "log has messages [1]", logged(*EVENTS[:2], *EVENTS[1:])),
        ("doubled", "2 terminal messages", logged(*EVENTS, end(5))),
        ("doubled", "goes on after", logged(*EVENTS, token(5))),
        ("doubled", "log goes back", logged(EVENTS[1], EVENTS[0], *EVENTS[2:])),
        ("lost", "3 tokens, its usage says 4", logged(*EVENTS[:3], end(3))),
        ("doubled", "5 tokens, its usage says 4", logged(*map(token, range(5)), end(5))),
        # Its readers.
        ("lost", "reader lacks messages [0]", read(1, 2, 3, 4)),
        ("lost", "reader lacks messages [4]", read(0, 1, 2, 3)),
        ("doubled", "reader has messages [2]", read(0, 1, 2, 2, 3, 4)),
        ("doubled", "reader goes back", read(0, 2, 1, 3, 4)),
        ("doubled", "beyond 5", read(0, 1, 2, 3, 4, 5)),
        ("stuck", "never saw the end", read(0, 1, 2, ended=False)),
        ("lost", "a poll showed 1 tokens", polled([0, 1], [0])),
        ("lost", "a poll showed 2 tokens", polled([0, 7], [0, 1, 2, 3])),
    ],
)
def test_a_problem_is_detected(kind: Kind, text: str, account: Account) -> None:
    problems = audit([GOOD, account])
    assert any(problem.kind == kind and text in problem.text for problem in problems), problems


def test_two_ends_of_one_output_are_doubled() -> None:
    first = FinishedEvent(id="t", seq=4, text="", finish_reason="length")
    problems = audit([logged(*EVENTS[:-1], first, end(5))])
    assert [(problem.kind, "output 0 ended 2 times" in problem.text) for problem in problems] == [
        ("doubled", True)
    ]
