"""One task's messages as this worker knows them: what is said, and how much of that Redis has stored.

Law: entries are only ever added, each `seq` once; what is stored follows from the replies, never from having
sent. Knows neither Redis nor threads.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from engine.outputs import SequenceOutput
from engine.sequence import FinishReason
from worker.errors import server_error
from worker.ownership import Ownership
from worker.protocol.messages import LogEntry, TaskError, Usage
from worker.protocol.outputs import end_of, has_ended, outputs_of, token_ids_of
from worker.protocol.store import Settlement, Write

_COMPLETED = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value})


class Stream:
    """The log of one owned task, from its first entry on, with those of earlier attempts.

    `facts` are stored with the next write. All entries are kept while the task lives: a log that lost its
    end with its host is filled up again from here.
    """

    def __init__(
        self,
        ownership: Ownership,
        *,
        entries: Sequence[LogEntry] = (),
        facts: Mapping[str, str] | None = None,
        num_prompt_tokens: int = 0,
    ) -> None:
        self.ownership = ownership
        self._entries = list(entries)
        self._num_stored = len(self._entries)
        self._num_prompt_tokens = num_prompt_tokens
        self._facts: dict[str, str] = dict(facts or {})
        self._stored_facts: dict[str, str] = {}
        self._settlement = self._settle_by_log() if has_ended(self._entries) else None

    @property
    def num_unstored(self) -> int:
        return len(self._entries) - self._num_stored

    @property
    def has_news(self) -> bool:
        return bool(self.num_unstored or self._facts or self._settlement)

    @property
    def has_ended(self) -> bool:
        return self._settlement is not None

    def note(self, facts: Mapping[str, str]) -> None:
        """Store these with the next write, as far as they are new. A fact that is empty is none."""
        for name, text in facts.items():
            # What waits to be stored may be so already: the reply of a write that failed is not known.
            if name in self._facts or self._stored_facts.get(name, "") != text:
                self._facts[name] = text

    def add(self, output: SequenceOutput) -> None:
        """A token, an end, or both; nothing comes after an end."""
        if output.token_id is not None:
            self._entries.append(LogEntry.of_token(output.token_id, output.text, output.index))
        if output.finish_reason:
            error = _error_of(output)
            self.note({"cached_tokens": str(output.num_cached_tokens)})
            self._end(output.finish_reason.value, output.held_text, output.num_cached_tokens, error)

    def fail(self, error: TaskError) -> None:
        """End the task as failed; what was published stays."""
        self._end(FinishReason.ERROR.value, "", 0, error)

    def to_write(self) -> Write:
        """All that is not stored yet."""
        return Write(
            task_id=self.ownership.task_id,
            owner=self.ownership.owner,
            first_seq=self._num_stored,
            entries=tuple(self._entries[self._num_stored :]),
            facts=dict(self._facts),
            settlement=self._settlement,
        )

    def stored(self, write: Write) -> None:
        """Redis has all of `write`."""
        self._num_stored = write.first_seq + len(write.entries)
        self._stored_facts.update(write.facts)
        self._facts = {n: text for n, text in self._facts.items() if write.facts.get(n) != text}

    def rewind(self, length: int) -> None:
        """Redis has lost entries: its log has `length`."""
        self._num_stored = length

    def _end(self, reason: str, text: str, num_cached_tokens: int, error: TaskError | None) -> None:
        usage = self._usage(num_cached_tokens)
        self._entries.append(LogEntry.of_end(text, reason, usage=usage, error=error))
        self._settlement = self._settle(reason, usage.to_json(), error.message if error else "")

    def _settle_by_log(self) -> Settlement:
        """An earlier attempt wrote the end and could not settle."""
        end = end_of(self._entries[-1])
        usage, error = end["usage"] or self._usage(0).to_json(), end["error"]
        return self._settle(end["finish_reason"], usage, error["message"] if error else "")

    def _usage(self, num_cached_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(token_ids_of(self._entries)),
            cached_tokens=num_cached_tokens,
        )

    def _settle(self, reason: str, usage: Mapping[str, int], error_text: str) -> Settlement:
        return Settlement(
            status="completed" if reason in _COMPLETED else "failed",
            reason=reason,
            result=json.dumps(
                {"outputs": [asdict(one) for one in outputs_of(self._entries)], "usage": dict(usage)}
            ),
            error_text=error_text,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
        )


def _error_of(output: SequenceOutput) -> TaskError | None:
    if output.finish_reason is FinishReason.ERROR:
        return server_error("engine_error", output.error or "the engine failed on this request")
    if output.finish_reason is FinishReason.TIMEOUT:
        return TaskError(type="timeout_error", code="timeout", message=output.error or "out of time")
    return None
