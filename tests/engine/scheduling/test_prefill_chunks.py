"""The distribution of a step's tokens among prefills."""

from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.budget import SchedulingBudget
from engine.scheduling.prefill_chunks import PrefillChunks
from engine.sequence import Sequence


def test_the_first_prefill_gets_the_remaining_tokens() -> None:
    """A step of 32 tokens for two prompts; each starts with 4."""
    config = EngineConfig(max_model_len=128, num_kv_blocks=64, max_num_batched_tokens=32, max_chunk_tokens=4)
    chunks = PrefillChunks(config, SchedulingBudget.of(config))
    params = SamplingParams(max_tokens=1)
    sequences = [Sequence(name, [1] * 100, params, arrival_time=0.0) for name in ("first", "second")]
    for sequence in sequences:
        sequence.num_computed_tokens = 16
        chunks.add(sequence, chunks.first_chunk(sequence, 16))
    assert list(chunks.distribute().values()) == [28, 4]
