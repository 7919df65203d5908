"""The messages of one task as this worker knows them, and how much of them Redis has stored.

Invariants: entries are only appended, each `seq` once. Each output ends once, and the last end settles the
task. What is stored follows from Redis's replies, never from having sent it.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.outputs import SequenceOutput, TokenLogprobs
from engine.sequence import FinishReason, worst_reason
from tokenmill.protocol.log import has_ended, num_tokens_of, outputs_of, prompt_logprobs_of
from tokenmill.protocol.messages import LogEntry, TaskError, Usage
from tokenmill.protocol.records import Settlement, Write
from worker.errors import INVALID_REQUEST, engine_error
from worker.ownership import Ownership
from worker.task_trace import TaskTrace

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express. OpenAI's API uses the same value."""

_COMPLETED = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class LogprobsWriter:
    """Log-probabilities as JSON: each token id with its text and its bytes.

    `token_bytes` returns the bytes of a token, which may be a part of a character. Tokens that have the same
    text differ in their bytes.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def members(self, output: SequenceOutput) -> dict[str, Any]:
        """Fields to add to a token's message. Empty if no logprobs were requested."""
        members: dict[str, Any] = {}
        if output.logprobs is not None:
            members["logprobs"] = self._describe(output.logprobs)
        if output.prompt_logprobs is not None:
            members["prompt_logprobs"] = [
                None if one is None else {"id": one.token_id, **self._describe(one)}
                for one in output.prompt_logprobs
            ]
        return members

    def _describe(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [{"id": token_id, **self._token(token_id, logprob)} for token_id, logprob in logprobs.top]
        return {**self._token(logprobs.token_id, logprobs.logprob), "top": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = self._token_bytes(token_id)
        return {
            "logprob": logprob if math.isfinite(logprob) else MIN_LOGPROB,
            "token": token_bytes.decode("utf-8", "replace"),
            "bytes": list(token_bytes),
        }


class Stream:
    """The log of one owned task from its first entry on, including the entries of earlier attempts.

    A task is completed if all of its `num_outputs` ended by stop or length. Otherwise it has failed, with the
    error of the first output that failed. All entries are kept until the task ends: a Redis that lost the end
    of the log gets it again from here. `num_cached_tokens`: as an earlier attempt reported them. `tenant`: as
    in the name of the task's queue.
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
        tenant: str = "",
        trace: TaskTrace | None = None,
    ) -> None:
        self.ownership = ownership
        self.tenant = tenant
        self.trace = trace or TaskTrace(ownership.task_id)
        self.num_prompt_tokens = num_prompt_tokens
        self._entries = list(entries)
        self._num_stored = len(self._entries)
        self._num_outputs = num_outputs
        self._num_cached_tokens = num_cached_tokens
        self._logprobs = logprobs
        self._facts: dict[str, str] = {}
        self._stored_facts: dict[str, str] = {}
        ends = {int(entry.index): entry.parse_members() for entry in self._entries if entry.is_end}
        self._reasons = {index: FinishReason(end["finish_reason"]) for index, end in ends.items()}
        self._error = next((error for end in ends.values() if (error := end.get("error"))), None)
        self._settlement = self._settle_from_log() if has_ended(self._entries) else None

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return num_tokens_of(self._entries)

    @property
    def error_code(self) -> str | None:
        """The code of the error of a failed task, once it has ended."""
        return str(self._error["code"]) if self._error else None

    @property
    def num_unstored(self) -> int:
        return len(self._entries) - self._num_stored

    @property
    def has_unstored(self) -> bool:
        """Whether there is anything to write: entries, facts, or the settlement."""
        return bool(self.num_unstored or self._facts or self._settlement)

    @property
    def has_ended(self) -> bool:
        return self._settlement is not None

    def record(self, facts: Mapping[str, str]) -> None:
        """Write those of the task's `facts` that changed. An empty text removes a fact."""
        for name, text in facts.items():
            # A pending fact is replaced even by the stored text, since its write may have succeeded without a
            # reply.
            if name in self._facts or self._stored_facts.get(name, "") != text:
                self._facts[name] = text

    def add(self, output: SequenceOutput) -> None:
        """Append a token, an end, or both. Ignored after the end of the output."""
        if output.index in self._reasons:
            return
        if output.token_id is not None:
            members = self._logprobs.members(output) if self._logprobs else None
            self._entries.append(LogEntry.of_token(output.token_id, output.text, output.index, members))
        if output.finish_reason:
            if output.index == 0:
                # All outputs share the prompt, which the first one computed.
                self._num_cached_tokens = output.num_cached_tokens
                self.record({"cached_tokens": str(output.num_cached_tokens)})
            self._end(output.index, output.finish_reason, output.held_text, _error_of(output))

    def fail(self, error: TaskError) -> None:
        """End the task as failed. What was published stays."""
        for index in self._open_outputs():
            self._end(index, FinishReason.ERROR, "", error)

    def to_write(self) -> Write:
        """Everything that is not stored yet."""
        return Write(
            task_id=self.ownership.task_id,
            owner=self.ownership.owner,
            first_seq=self._num_stored,
            entries=tuple(self._entries[self._num_stored :]),
            facts=dict(self._facts),
            settlement=self._settlement,
        )

    def mark_stored(self, write: Write) -> None:
        """Redis accepted `write`."""
        self._num_stored = write.first_seq + len(write.entries)
        self._stored_facts.update(write.facts)
        self._facts = {n: text for n, text in self._facts.items() if write.facts.get(n) != text}

    def rewind(self, length: int) -> None:
        """Redis lost entries. Its log has `length` of them."""
        self._num_stored = length

    def _open_outputs(self) -> list[int]:
        return [index for index in range(self._num_outputs) if index not in self._reasons]

    def _end(self, index: int, reason: FinishReason, text: str, error: TaskError | None) -> None:
        self._reasons[index] = reason
        if self._open_outputs():
            end = LogEntry.of_end(text, reason.value, index=index, done=False, error=error)
            self._entries.append(end)
            self._error = self._error or (error.to_json() if error else None)
            return
        error = TaskError(**self._error) if self._error else error
        self._error = error.to_json() if error else None
        usage = self._usage()
        self._entries.append(LogEntry.of_end(text, reason.value, index=index, usage=usage, error=error))
        self._settlement = self._settle(usage.to_json(), error)

    def _settle_from_log(self) -> Settlement:
        """An earlier attempt wrote the end without settling the task."""
        end = self._entries[-1].parse_members()
        usage, error = end["usage"] or self._usage().to_json(), end["error"]
        return self._settle(usage, TaskError(**error) if error else None)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_tokens,
            cached_tokens=self._num_cached_tokens,
        )

    def _settle(self, usage: Mapping[str, int], error: TaskError | None) -> Settlement:
        reason = worst_reason(self._reasons.values())
        return Settlement(
            status="completed" if reason in _COMPLETED else "failed",
            reason=reason.value,
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
