"""A request as the engine takes it: the one argument of `Engine.add`."""

from dataclasses import KW_ONLY, dataclass

from engine.outputs import ResumedOutput
from engine.requests.deadlines import NO_DEADLINES, Deadlines
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt, its parameters and its limits; the engine generates `params.n` outputs.

    `priority`: a lower number is served first. `arrival_time` orders requests of one priority: epoch seconds
    in the worker, any increasing number elsewhere. `cache_salt`: only requests with equal salts share
    cached prefixes. `resumed`: what an earlier engine generated. Finished outputs are not run again;
    the others continue after their tokens, and their earlier text is not reported again. `waited_seconds`:
    time since the request was accepted; `deadlines` and the times in reports count from that moment.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    _: KW_ONLY
    arrival_time: float
    priority: int = 2
    cache_salt: bytes = b""
    deadlines: Deadlines = NO_DEADLINES
    resumed: tuple[ResumedOutput, ...] = ()
    waited_seconds: float = 0.0
