"""One request in flight: its tokens, its blocks, and where it stands.

Law: every change of status goes through `Sequence._become`, and every legal change is a row of
`TRANSITIONS`. This file does not know who decides on the changes.
"""

from enum import Enum
from operator import attrgetter

from engine.constraints import FREE, Constraints
from engine.errors import IllegalTransition
from engine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    #: In the waiting queue: holds neither slot nor blocks. Its tokens may be more than the prompt.
    WAITING = "waiting"
    #: Holds a slot and the blocks of all that it has computed.
    RUNNING = "running"
    #: Ended, for the reason in `finish_reason`; holds nothing.
    FINISHED = "finished"


class FinishReason(Enum):
    #: The model's end of text, a stop string or a stop token.
    STOP = "stop"
    #: `max_tokens`, the model's length or the size of the KV pool.
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class Sequence:
    """One output of one request in flight: `index` of `params.n`.

    `token_ids` are all that are known (prompt, then output); the keys and values of the first
    `num_computed_tokens` of them are computed or being computed. `block_table` lists the KV blocks that hold
    them, in order; `block_end`: where the block of its newest token ends, in tokens. `slot` is its row in the
    runner's arrays while it runs. `arrival_time` orders sequences of one `priority` (lower first in both); it
    outlives preemption. `queued_at`: when its waiting began, on the scheduler's clock; None: as it joins.
    `num_cached_tokens`: prompt tokens that were found computed when it was first admitted; only sequences of
    one `cache_salt` find each other's, and the outputs of one request also where prefix caching is off.
    `num_in_flight_tokens`: the last of those that are computed belong to a step that has not ended.
    `num_lost_tokens`: the most that a preemption made it compute again. `num_charged_tokens`: known tokens
    that its tenant was charged for, or that were free.

    `waiting_since`: when its waiting would have begun if it had never run (a preempted one has waited as long
    as before, and not while it ran); `waited_seconds`: what it had waited when it was last admitted.
    `scheduled_at`: when the step that first scheduled it was decided, on the scheduler's clock, or None.
    `is_verified`: since it was last admitted a finite row was sampled from all that it has computed.
    `is_promoted`: it runs because it had waited too long. `is_pinned`: it runs and holds
    blocks for all that it may ever know, and keeps them.
    """

    __slots__ = (
        "arrival_time", "block_digests", "block_end", "block_table", "cache_salt", "constraints",
        "finish_reason", "index", "is_pinned", "is_promoted", "is_verified", "num_cached_tokens",
        "num_charged_tokens", "num_computed_tokens", "num_in_flight_tokens", "num_lost_tokens",
        "num_preemptions", "num_prompt_tokens", "num_published_blocks", "order", "params", "priority",
        "queued_at", "request_id", "scheduled_at", "slot", "status", "tenant", "token_ids", "waited_seconds",
        "waiting_since",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        index: int = 0,
        priority: int = 2,
        tenant: str = "default",
        queued_at: float | None = None,
        output_token_ids: list[int] | None = None,
        cache_salt: bytes = b"",
        constraints: Constraints = FREE,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.tenant = tenant
        self.queued_at = queued_at
        self.constraints = constraints
        self.params = params
        self.arrival_time = arrival_time
        self.priority = priority
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = [*prompt_token_ids, *(output_token_ids or [])]
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.num_published_blocks = 0
        self.num_charged_tokens = 0
        self.waiting_since = 0.0 if queued_at is None else queued_at
        self.waited_seconds = 0.0
        self.scheduled_at: float | None = None
        self.is_promoted = self.is_pinned = self.is_verified = False
        self.block_table: list[int] = []
        self.block_end = 0
        self.block_digests: list[bytes] = []
        self.cache_salt = cache_salt
        self.slot: int | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        #: What comes first when not all can be served; id and index make it total.
        self.order = (priority, arrival_time, request_id, index)

    @property
    def shares_blocks(self) -> bool:
        """Several outputs of one request share the blocks of its prompt."""
        return self.params.n > 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every row of its prompt is wanted, until it has come to its first output."""
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """The gap that steps close: the whole prompt at first, one when decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_written_tokens(self) -> int:
        """Those whose keys and values were computed by steps that have ended."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def is_decoding(self) -> bool:
        """Its gap is one, and it has sampled before."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def get_prompt_len(self) -> int:
        return self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def admit(self, slot: int, num_found_tokens: int = 0) -> None:
        """Take a slot. The first `num_found_tokens` need no computing: their blocks were found."""
        self._become(SequenceStatus.RUNNING)
        self.slot = slot
        self.is_verified = False
        self.num_computed_tokens = num_found_tokens
        if not self.num_preemptions:
            self.num_cached_tokens = min(num_found_tokens, self.num_prompt_tokens)

    def preempt(self) -> None:
        """Give up the slot and what was computed; the tokens stay, to be computed again."""
        self._become(SequenceStatus.WAITING)
        self.slot = None
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.num_preemptions += 1
        self.is_promoted = False

    def finish(self, reason: FinishReason) -> None:
        self._become(SequenceStatus.FINISHED)
        self.slot = None
        self.finish_reason = reason

    def _become(self, status: SequenceStatus) -> None:
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"{self.request_id}: {self.status.value} -> {status.value}")
        self.status = status


ORDER = attrgetter("order")
"""Sorts sequences by who comes first when not all can be served."""
