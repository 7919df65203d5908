"""A step that was decided and has not been told, and what stands for the tokens that it will bring.

Law: a token that is not on the host yet has a stand-in only while the step after is decided and launched; at
any other time a sequence knows what it knows. Knows neither devices nor the scheduler's rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sequence import Sequence
from engine.steps.fault_isolation import ExecutedStep


@dataclass(slots=True)
class InFlight:
    """A decision. `launched`: what the device was given to do, None: nothing of it; `executed`: what came.

    `is_under_way`: something else was done since it was decided. Only then can a sequence of it have ended.
    """

    outputs: SchedulerOutputs
    launched: Any = None
    executed: ExecutedStep | None = None
    is_under_way: bool = False

    @property
    def is_wanted(self) -> bool:
        """Some of its sequences have not ended."""
        return any(not item.sequence.is_finished() for item in self.outputs.scheduled)

    def drop_the_ended(self) -> None:
        """Of sequences that ended meanwhile nothing is to be executed, noted or told."""
        if not self.is_under_way:
            return
        items = self.outputs.scheduled
        kept = [item for item in items if not item.sequence.is_finished()]
        if len(kept) < len(items):
            self.outputs = self.outputs.only(kept, is_first=True)

    def note_under_way(self) -> None:
        """What it computes is not to be found by anybody yet."""
        self.is_under_way = True
        for item in self.outputs.scheduled:
            item.sequence.num_in_flight_tokens = item.num_new_tokens

    def note_ended(self) -> None:
        if not self.is_under_way:
            return
        for item in self.outputs.scheduled:
            item.sequence.num_in_flight_tokens = 0


def placeholders(items: tuple[ScheduledSequence, ...]) -> Iterator[tuple[Sequence, int]]:
    """Each sequence that samples, with the id that stands for its token: -1 - its place among them."""
    return ((item.sequence, -1 - place) for place, item in enumerate(filter(_samples, items)))


def _samples(item: ScheduledSequence) -> bool:
    return item.samples
