"""Packs writes into one string for `publish.lua`: hundreds of script arguments would dominate the client's
cost.
"""

import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tokenmill.protocol import rq_keys
from tokenmill.protocol.records import Settlement, Write

_SEPARATOR = "\x1f"
"""Does not occur in JSON text, where control characters are escaped."""


def packed(writes: Sequence[Write]) -> bytes:
    """The argument of `publish.lua`. Raises ValueError for a value that contains the separator."""
    fields = list(chain.from_iterable(map(_write_fields, writes)))
    packed = _SEPARATOR.join((*fields, ""))
    if packed.count(_SEPARATOR) != len(fields):
        raise ValueError("an entry or a fact contains the separator, a control character")
    # A lone surrogate must not prevent the other writes.
    return packed.encode(errors="replace")


def _write_fields(write: Write) -> Iterator[str]:
    facts = {name: value for name, value in write.facts.items() if name != "scheduled"}
    scheduled = write.facts.get("scheduled", "")
    status = write.settlement.status if write.settlement else ""
    counts = (str(write.first_seq), str(len(write.entries)), str(len(facts)))
    yield from (write.task_id, write.owner, *counts, scheduled, status)
    for entry in write.entries:
        yield from (entry.token, entry.text, entry.index, entry.members)
    yield from chain.from_iterable(facts.items())
    if write.settlement:
        yield from _settlement_fields(write.settlement)


def _settlement_fields(settlement: Settlement) -> Iterable[str]:
    failed = settlement.status == "failed"
    return (
        settlement.reason,
        str(rq_keys.RESULT_FAILED if failed else rq_keys.RESULT_SUCCESSFUL),
        b64encode(settlement.result.encode(errors="replace")).decode(),
        compressed(settlement.error_text) if failed else "",
        str(settlement.prompt_tokens),
        str(settlement.completion_tokens),
        "1" if settlement.is_client_error else "",
    )


def compressed(text: str) -> str:
    """The form in which RQ stores the text of an exception."""
    return b64encode(zlib.compress(text.encode(errors="replace"))).decode()
