"""What is never taken in, and who may go past a waiting sequence that does not fit: `EngineConfig.policy`.

Law: what can never fit is refused at once, with the limit named. Nobody goes past for want of a slot: that is
wanting to all. Knows no queue.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import NeverFits
from engine.outputs import WaitingReason
from engine.sequence import Sequence

_ANOTHER_MAY_FIT = frozenset({WaitingReason.KV_BLOCKS, WaitingReason.TOKEN_BUDGET})


class Admission(Protocol):
    """How far a step looks past one that does not fit."""

    @property
    def max_others(self) -> int:
        """So many are tried after the first that does not fit."""
        ...

    def allows_skip(self, reason: WaitingReason) -> bool:
        """Whether the next in order is tried after one was kept out for `reason`."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """One that does not fit keeps all behind it waiting."""

    max_others: int = 0

    def allows_skip(self, reason: WaitingReason) -> bool:  # noqa: ARG002 - never
        return False


@dataclass(frozen=True, slots=True)
class SkipAhead:
    """Smaller ones may go first, for as long as the one passed over is not promoted."""

    max_others: int

    def allows_skip(self, reason: WaitingReason) -> bool:
        return reason in _ANOTHER_MAY_FIT


def admission_of(config: EngineConfig) -> Admission:
    return SkipAhead(config.max_skip_ahead) if config.policy == "skip_ahead" else Fifo()


def refuse_what_never_fits(config: EngineConfig, sequence: Sequence) -> None:
    """Raises `NeverFits` where no step could ever take `sequence`."""
    prompt_len = sequence.get_prompt_len()
    if prompt_len >= config.max_model_len:
        limit = f"the model takes at most {config.max_model_len - 1} and one output"
    elif prompt_len > config.kv_capacity:
        limit = f"the KV cache holds {config.kv_capacity}"
    elif prompt_len > config.max_prompt_tokens and not sequence.num_output_tokens:
        limit = f"without chunked prefill a step takes at most {config.max_num_batched_tokens}"
    else:
        return
    raise NeverFits("prompt", f"has {prompt_len} tokens; {limit}")
