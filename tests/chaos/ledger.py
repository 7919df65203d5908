"""Checks that every accepted request ended once, with all of its messages, each delivered once. Pure.

A problem is lost, doubled or stuck, and names the request. Texts are checked in `tests.chaos.outputs`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.readers import TERMINAL, Reading
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent

Kind = Literal["lost", "doubled", "stuck"]
REASONS = {"stop": "completed", "length": "completed", "cancelled": "cancelled"}
"""Any other finish reason is a failure."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An accepted request as it was read and stored.

    `task_ids`: the replies to its submissions. `status`: the stored status, None if nothing is stored.
    `may_be`: the allowed final statuses. `events`: its log. `num_results`: entries of RQ's results.
    `webhooks`: the statuses that the receiver got; None if the request has no webhook.
    """

    name: str
    task_ids: tuple[str, ...]
    status: str | None
    may_be: frozenset[str]
    events: tuple[Event, ...]
    num_results: int
    reading: Reading
    timed_out: bool = False
    webhooks: tuple[str, ...] | None = None


def audit(accounts: Iterable[Account]) -> list[Problem]:
    """The problems of all accounts."""
    return [
        Problem(kind, f"{account.name}, task {account.task_ids[0]}: {text}")
        for account in accounts
        for kind, text in _faults(account)
    ]


Fault = tuple[Kind, str]


def _faults(account: Account) -> Iterator[Fault]:
    if len(set(account.task_ids)) > 1:
        yield "doubled", f"one submission became {len(set(account.task_ids))} tasks"
    if account.status is None:
        yield "lost", "nothing is stored of it"
        return
    if account.status not in TERMINAL:
        yield "stuck", f"it is still {account.status}"
        return
    if account.timed_out:
        yield "stuck", "its client waited for an answer until the end"
    yield from _end_faults(account)
    yield from _log_faults(account.events)
    yield from _reader_faults(account)


def _end_faults(account: Account) -> Iterator[Fault]:
    """One end and one result. All readers saw the same status."""
    if account.status not in account.may_be:
        yield "lost", f"it ended as {account.status}: {_errors(account.events)}"
    for status in account.reading.statuses:
        if status != account.status:
            yield "doubled", f"it was reported as {status} and is {account.status}"
    expected = 0 if account.status == "cancelled" else 1
    if account.num_results != expected:
        yield fewer_or_more(account.num_results, expected), f"it has {account.num_results} results"
    yield from _webhook_faults(account)
    for event in account.events:
        if isinstance(event, FinishedEvent) and event.done and _status(event) != account.status:
            yield "doubled", f"its log ends with {event.finish_reason}, and it is {account.status}"


def _webhook_faults(account: Account) -> Iterator[Fault]:
    """Delivered at least once, always with the same status."""
    if account.webhooks == ():
        yield "lost", "its webhook never arrived"
    for status in account.webhooks or ():
        if status != account.status:
            yield "doubled", f"its webhook reported {status}, and it is {account.status}"


def _log_faults(events: Sequence[Event]) -> Iterator[Fault]:
    """No gaps, ordered, one terminal message at the end, one end for each output, counts that agree."""
    yield from _seq_faults([event.seq for event in events], len(events), "its log")
    ends = [event for event in events if isinstance(event, FinishedEvent)]
    terminal = [event for event in ends if event.done]
    if len(terminal) != 1:
        yield fewer_or_more(len(terminal), 1), f"its log has {len(terminal)} terminal messages"
        return
    if terminal[0] is not events[-1]:
        yield "doubled", "its log goes on after the terminal message"
    for index, number in Counter(event.index for event in ends).items():
        if number > 1:
            yield "doubled", f"output {index} ended {number} times"
    num_tokens, reported = len(events) - len(ends), (terminal[0].usage or {}).get("completion_tokens")
    if reported != num_tokens:
        yield (
            fewer_or_more(num_tokens, reported or 0),
            f"its log has {num_tokens} tokens, its usage says {reported}",
        )


def _reader_faults(account: Account) -> Iterator[Fault]:
    """Each message once, in order, to the end. Polls never show fewer tokens than before."""
    reading = account.reading
    if not reading.ended:
        yield "stuck", "its reader never saw the end"
    elif not reading.polls:
        yield from _seq_faults(reading.seqs, len(account.events), "its reader")
    # Of polls only the first output is checked.
    final = [event.token for event in account.events if isinstance(event, TokenEvent) and event.index == 0]
    shortest = 0
    for polled in reading.polls:
        if len(polled) < shortest or polled != final[: len(polled)]:
            yield "lost", f"a poll showed {len(polled)} tokens that are not those of its log"
            return
        shortest = len(polled)


def _seq_faults(seqs: Sequence[int], length: int, who: str) -> Iterator[Fault]:
    counts = Counter(seqs)
    if doubled := sorted(seq for seq, number in counts.items() if number > 1):
        yield "doubled", f"{who} has messages {doubled[:5]} more than once"
    if missing := sorted(set(range(length)) - counts.keys()):
        yield "lost", f"{who} lacks messages {missing[:5]} of {length}"
    if surplus := sorted(counts.keys() - set(range(length))):
        yield "doubled", f"{who} has messages {surplus[:5]} beyond {length}"
    if list(seqs) != sorted(seqs):
        yield "doubled", f"{who} goes back in the order of messages"


def fewer_or_more(found: int, expected: int) -> Kind:
    """The kind of problem that a wrong number is."""
    return "lost" if found < expected else "doubled"


def _status(end: FinishedEvent) -> str:
    return REASONS.get(end.finish_reason, "failed")


def _errors(events: Sequence[Event]) -> str:
    return "; ".join(
        f"{event.finish_reason} {event.error}" for event in events if isinstance(event, FinishedEvent)
    )
