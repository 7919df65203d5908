"""How a step is dealt out between prompts: who gets what is left."""

from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.budget import SchedulingBudget
from engine.scheduling.prefill_chunks import PrefillChunks
from engine.sequence import Sequence


def test_what_is_left_goes_to_the_first() -> None:
    """32 tokens of a step, between two prompts of which 16 tokens are computed; at first each takes 4."""
    config = EngineConfig(max_model_len=128, num_kv_blocks=64, max_num_batched_tokens=32, max_chunk_tokens=4)
    shares = PrefillChunks(config, SchedulingBudget.of(config))
    params = SamplingParams(max_tokens=1)
    sequences = [Sequence(name, [1] * 100, params, arrival_time=0.0) for name in ("first", "second")]
    for sequence in sequences:
        sequence.num_computed_tokens = 16
        shares.take(sequence, shares.first_chunk(sequence, 16))
    found = shares.distribute()
    assert [found[sequence] for sequence in sequences] == [28, 4]
