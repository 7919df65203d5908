"""One task's messages as this worker knows them: what is said, and how much of that Redis has stored.

Law: entries are only ever added, each `seq` once; each output ends once, and with the last of them the task.
What is stored follows from the replies, never from having sent. Knows neither Redis nor threads.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from engine.outputs import SequenceOutput
from engine.sequence import FinishReason
from tokenmill.protocol.log import has_ended, num_tokens_of, outputs_of, prompt_logprobs_of
from tokenmill.protocol.messages import LogEntry, TaskError, Usage
from tokenmill.protocol.records import Settlement, Write
from worker.errors import INVALID_REQUEST, engine_error
from worker.logprobs import LogprobsWriter
from worker.ownership import Ownership

_WORST_FIRST = tuple(
    reason.value
    for reason in (
        FinishReason.CANCELLED,
        FinishReason.ERROR,
        FinishReason.TIMEOUT,
        FinishReason.LENGTH,
        FinishReason.STOP,
    )
)
_COMPLETED = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value})


class Stream:
    """The log of one owned task, from its first entry on, with those of earlier attempts.

    A task is completed if all its `num_outputs` have ended by stop or length, else it has failed, with the
    error of the first that failed. All entries are kept while the task lives: a log that lost its end with
    its host is filled up again from here. `num_cached_tokens`: as an earlier attempt told them.
    """

    def __init__(
        self,
        ownership: Ownership,
        *,
        entries: Sequence[LogEntry] = (),
        num_prompt_tokens: int = 0,
        num_outputs: int = 1,
        num_cached_tokens: int = 0,
        logprobs: LogprobsWriter | None = None,
    ) -> None:
        self.ownership = ownership
        self._entries = list(entries)
        self._num_stored = len(self._entries)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_outputs = num_outputs
        self._num_cached_tokens = num_cached_tokens
        self._logprobs = logprobs
        self._facts: dict[str, str] = {}
        self._stored_facts: dict[str, str] = {}
        ends = {int(entry.index): entry.parse_members() for entry in self._entries if entry.is_end}
        self._reasons: dict[int, str] = {index: end["finish_reason"] for index, end in ends.items()}
        self._error = next((error for end in ends.values() if (error := end.get("error"))), None)
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

    @property
    def num_open(self) -> int:
        """Outputs that have not ended."""
        return len(self._open())

    def note(self, facts: Mapping[str, str]) -> None:
        """Store these with the next write, as far as they are new. A fact that is empty is none."""
        for name, text in facts.items():
            # What waits to be stored may be so already: the reply of a write that failed is not known.
            if name in self._facts or self._stored_facts.get(name, "") != text:
                self._facts[name] = text

    def add(self, output: SequenceOutput) -> None:
        """A token, an end, or both; nothing comes after the end of an output."""
        if output.index in self._reasons:
            return
        if output.token_id is not None:
            members = self._logprobs.members(output) if self._logprobs else None
            self._entries.append(LogEntry.of_token(output.token_id, output.text, output.index, members))
        if output.finish_reason:
            if output.index == 0:
                # The prompt is one for all outputs, and the first of them computed it.
                self._num_cached_tokens = output.num_cached_tokens
                self.note({"cached_tokens": str(output.num_cached_tokens)})
            self._end(output.index, output.finish_reason.value, output.held_text, _error_of(output))

    def fail(self, error: TaskError) -> None:
        """End the task as failed; what was published stays."""
        for index in self._open():
            self._end(index, FinishReason.ERROR.value, "", error)

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

    def _open(self) -> list[int]:
        return [index for index in range(self._num_outputs) if index not in self._reasons]

    def _end(self, index: int, reason: str, text: str, error: TaskError | None) -> None:
        self._reasons[index] = reason
        if self._open():
            self._entries.append(LogEntry.of_end(text, reason, index=index, done=False, error=error))
            self._error = self._error or (error.to_json() if error else None)
            return
        error = TaskError(**self._error) if self._error else error
        usage = self._usage()
        self._entries.append(LogEntry.of_end(text, reason, index=index, usage=usage, error=error))
        self._settlement = self._settle(usage.to_json(), error)

    def _settle_by_log(self) -> Settlement:
        """An earlier attempt wrote the end and could not settle."""
        end = self._entries[-1].parse_members()
        usage, error = end["usage"] or self._usage().to_json(), end["error"]
        return self._settle(usage, TaskError(**error) if error else None)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_tokens_of(self._entries),
            cached_tokens=self._num_cached_tokens,
        )

    def _settle(self, usage: Mapping[str, int], error: TaskError | None) -> Settlement:
        reason = min(self._reasons.values(), key=_WORST_FIRST.index)
        return Settlement(
            status="completed" if reason in _COMPLETED else "failed",
            reason=reason,
            result=self._result(usage),
            error_text=error.message if error else "",
            is_client_error=error is not None and error.type == INVALID_REQUEST,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
        )

    def _result(self, usage: Mapping[str, int]) -> str:
        outputs = [asdict(one) for one in outputs_of(self._entries, self._num_outputs)]
        prompt_logprobs = prompt_logprobs_of(self._entries)
        return json.dumps({"outputs": outputs, "usage": dict(usage), "prompt_logprobs": prompt_logprobs})


def _error_of(output: SequenceOutput) -> TaskError | None:
    if output.finish_reason is FinishReason.ERROR:
        return engine_error(output.error or "the engine failed on this request")
    if output.finish_reason is FinishReason.TIMEOUT:
        return TaskError(type="timeout_error", code="timeout", message=output.error or "out of time")
    return None
