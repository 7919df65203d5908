"""The run whose pauses between tokens are to be short: what it sets, and that this bounds a step."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.peers.tokenmill import Tokenmill
from benchmarks.serving.plan import SHORT_CHUNKS
from benchmarks.serving.protocol import Settings
from benchmarks.serving.systems import OURS, SHORT_STEP_TOKENS, SYSTEMS
from engine.config import EngineConfig
from engine.outputs import SampledToken
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence


@pytest.mark.parametrize(("system", "budget"), [(OURS, 512), (SHORT_CHUNKS, SHORT_STEP_TOKENS)])
def test_a_system_s_own_limits_go_before_those_of_all(
    system: str, budget: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, object] = {}

    class Built:
        attention = "torch"

        def new_engine(self) -> None:
            return None

    def build_execution(model: str, **options: object) -> Built:
        asked.update(options, model=model)
        return Built()

    monkeypatch.setattr("engine.execution.build.build_execution", build_execution)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    settings = Settings(
        model="m", dtype="float32", threads=2, token_budget=512, max_seqs=8, max_model_len=4096,
        kv_tokens=8192, kv_bytes=1, scratch=str(tmp_path), options=SYSTEMS[system].options,
    )  # fmt: skip
    Tokenmill().load(settings)
    assert (asked["max_num_batched_tokens"], asked["max_num_seqs"]) == (budget, 8)


def longest_step(**limits: Any) -> int:
    """Tokens of the longest step with a decode, while four long prompts are computed."""
    config = EngineConfig(max_model_len=4096, num_kv_blocks=512, **limits)
    scheduler = Scheduler(config, clock=lambda: 0.0)
    for place, length in enumerate((20, 1000, 1000, 1000, 1000)):
        params = SamplingParams(max_tokens=100)
        scheduler.add_sequence(Sequence(str(place), list(range(length)), params, arrival_time=float(place)))
    longest = 0
    for _ in range(100):
        outputs = scheduler.schedule()
        items = (*outputs.prefill, *outputs.decode)
        longest = max(longest, sum(item.num_new_tokens for item in items) if outputs.decode else 0)
        scheduler.update(outputs, {item.sequence: SampledToken(7) for item in items if item.samples}, {})
    return longest


def test_a_cap_on_one_prompt_does_not_bound_a_step_and_a_cap_on_the_step_does() -> None:
    assert longest_step(max_chunk_tokens=64) == 512
    assert longest_step(max_num_batched_tokens=SHORT_STEP_TOKENS) == SHORT_STEP_TOKENS
