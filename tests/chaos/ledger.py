"""The books: every accepted request ended once, with all of its messages, and nothing is left over. Pure.

Law: whatever is not as it should be is lost, doubled or stuck, and is told with the request's name. Knows
what was read and what is stored, not how either came about; texts are judged elsewhere.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.readers import TERMINAL, Reading
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent

Kind = Literal["lost", "doubled", "stuck"]
REASONS = {"stop": "completed", "length": "completed", "cancelled": "cancelled"}
"""Any other reason to finish is a failure."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """All that is known of one accepted request.

    `task_ids`: as each of its submissions was answered. `status`: as it is stored, None where nothing is;
    `may_be`: the ends that it may have. `events`: its log. `num_results`: rows of RQ's results. `webhooks`:
    as what its receiver was told that it ended; None where nobody was to be told.
    """

    name: str
    task_ids: tuple[str, ...]
    status: str | None
    may_be: frozenset[str]
    events: tuple[Event, ...]
    num_results: int
    reading: Reading
    gave_up: bool = False
    webhooks: tuple[str, ...] | None = None


def audit(accounts: Iterable[Account]) -> list[Problem]:
    """What is wrong with each."""
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
    if account.gave_up:
        yield "stuck", "its client waited for an answer until the end"
    yield from _end_faults(account)
    yield from _log_faults(account.events)
    yield from _reader_faults(account)


def _end_faults(account: Account) -> Iterator[Fault]:
    """One end, one result, and everybody was told the same."""
    if account.status not in account.may_be:
        yield "lost", f"it ended as {account.status}: {_errors(account.events)}"
    for told in account.reading.told:
        if told != account.status:
            yield "doubled", f"it was told as {told} and is {account.status}"
    expected = 0 if account.status == "cancelled" else 1
    if account.num_results != expected:
        yield fewer_or_more(account.num_results, expected), f"it has {account.num_results} results"
    yield from _webhook_faults(account)
    for event in account.events:
        if isinstance(event, FinishedEvent) and event.done and _status(event) != account.status:
            yield "doubled", f"its log ends with {event.finish_reason}, and it is {account.status}"


def _webhook_faults(account: Account) -> Iterator[Fault]:
    """At least once, and each time the same."""
    if account.webhooks == ():
        yield "lost", "its webhook was never told"
    for told in account.webhooks or ():
        if told != account.status:
            yield "doubled", f"its webhook was told {told}, and it is {account.status}"


def _log_faults(events: Sequence[Event]) -> Iterator[Fault]:
    """Gap-free, monotonic, one terminal message, the last; an end for each output; numbers that agree."""
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
    num_tokens, told = len(events) - len(ends), (terminal[0].usage or {}).get("completion_tokens")
    if told != num_tokens:
        yield fewer_or_more(num_tokens, told or 0), f"its log has {num_tokens} tokens, its usage says {told}"


def _reader_faults(account: Account) -> Iterator[Fault]:
    """Each message once, in order, to the end; what was shown is never taken back."""
    reading = account.reading
    if not reading.ended:
        yield "stuck", "its reader never saw the end"
    elif not reading.glimpses:
        yield from _seq_faults(reading.seqs, len(account.events), "its reader")
    # Polls are looked at for their first output.
    final = [event.token for event in account.events if isinstance(event, TokenEvent) and event.index == 0]
    shortest = 0
    for glimpse in reading.glimpses:
        if len(glimpse) < shortest or glimpse != final[: len(glimpse)]:
            yield "lost", f"a poll showed {len(glimpse)} tokens that are not those of its log"
            return
        shortest = len(glimpse)


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
    """What a wrong number means."""
    return "lost" if found < expected else "doubled"


def _status(end: FinishedEvent) -> str:
    return REASONS.get(end.finish_reason, "failed")


def _errors(events: Sequence[Event]) -> str:
    return "; ".join(
        f"{event.finish_reason} {event.error}" for event in events if isinstance(event, FinishedEvent)
    )
