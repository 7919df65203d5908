"""The runner computes exactly the decision, whole or in parts."""

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import DeviceLost
from engine.execution.attention.interface import AttentionBatch, AttentionMetadata
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.sampling.sampler import Sampler
from engine.outputs import SchedulerOutputs
from engine.sampling_params import SamplingParams
from tests.comparer import reference
from tests.engine.execution.serving import GREEDY, in_slot, make_prompts, make_runner, part, serve
from tests.tiny_models import make_model

CONFIG = EngineConfig(max_model_len=64, num_kv_blocks=32, block_size=4, max_num_seqs=4)
PROMPT = make_prompts((18,))["18 tokens"]


def eager_logits(token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = make_model("llama")(
            input_ids=torch.tensor([token_ids]), use_cache=False
        ).logits[0]
    return logits


def pooled_backend(runner: ModelRunner) -> TorchAttention:
    backend = runner._backend
    assert isinstance(backend, TorchAttention)
    return backend


def test_wanted_rows_are_in_the_order_of_the_decision() -> None:
    runner = make_runner(make_model("llama"), CONFIG)
    other = PROMPT[::-1][:9]
    first, second = in_slot(0, PROMPT, [1, 2, 3, 4, 5]), in_slot(1, other, [8, 7, 6])
    runner.execute(SchedulerOutputs(prefill=(part(second, 0, 8, logits_from=8),)))
    logits = runner.execute(
        SchedulerOutputs(decode=(part(second, 8, 9),), prefill=(part(first, 0, 18, logits_from=15),))
    )
    assert logits.shape[0] == 4
    torch.testing.assert_close(logits[0], eager_logits(other)[8], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1:], eager_logits(PROMPT)[15:], rtol=1e-4, atol=1e-4)


def test_a_step_without_logits() -> None:
    runner = make_runner(make_model("llama"), CONFIG)
    sequence = in_slot(0, PROMPT, [1, 2, 3, 4, 5])
    assert len(runner.execute(SchedulerOutputs(prefill=(part(sequence, 0, 18, logits_from=18),)))) == 0


def test_parts_of_a_decision_may_be_recomputed() -> None:
    """vllm#5822: after an exception of one request, the others must continue unaffected.

    Block 1 is zeroed before the step and not again between its parts, as the first part has written to it.
    """
    runner = make_runner(make_model("llama"), CONFIG)
    sequences = [
        in_slot(slot, PROMPT[slot:], [1 + slot, 11 + slot, 21 + slot, 5 + slot, 16]) for slot in (0, 1)
    ]
    items = tuple(part(one, 0, 15, logits_from=14) for one in sequences)
    outputs = SchedulerOutputs(prefill=items, released_slots=(0, 1), blocks_to_zero=(1,))
    whole = runner.execute(outputs)
    halves = [runner.execute(outputs.subset([item], is_first=item is items[0])) for item in items]
    torch.testing.assert_close(torch.cat(halves), whole, rtol=1e-4, atol=1e-4)
    later = runner.execute(SchedulerOutputs(decode=tuple(part(one, 15, 16) for one in sequences)))
    torch.testing.assert_close(later[0], eager_logits(PROMPT)[15], rtol=1e-4, atol=1e-4)


def test_non_finite_values_do_not_reach_other_requests() -> None:
    """Blocks that held NaN must not poison their next owner: 0 x NaN is NaN.

    The blocks are not zeroed on request here: the poisoned request was cancelled before its rows were read.
    """
    model = make_model("llama")
    poison = 7
    with torch.no_grad():
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        embeddings.weight[poison] = torch.nan
    runner = make_runner(model, CONFIG)
    cancelled = in_slot(0, [poison] * 8, [1, 2])
    runner.execute(SchedulerOutputs(prefill=(part(cancelled, 0, 8, logits_from=8),)))
    healthy = [token for token in PROMPT if token != poison][:6]
    heir = in_slot(0, healthy, [2, 1])
    chunk = runner.execute(SchedulerOutputs(prefill=(part(heir, 0, 5),), released_slots=(0,)))
    single = runner.execute(SchedulerOutputs(decode=(part(heir, 5, 6),)))
    found = torch.cat([chunk, single])
    torch.testing.assert_close(found, eager_logits(healthy), rtol=1e-4, atol=1e-4)


def test_only_a_request_with_non_finite_values_fails() -> None:
    """vllm#45116: NaN in one row ends that request, with a reason, and no other."""
    model = make_model("llama")
    poison = 7
    with torch.no_grad():
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        embeddings.weight[poison] = torch.nan
    healthy = [token for token in PROMPT if token != poison]
    requests = {"bad": ([5, poison, 6], GREEDY), "good": (healthy, GREEDY)}
    served = serve(make_runner(model, CONFIG), CONFIG, requests)
    assert list(served.errors) == ["bad"]
    assert "non-finite" in served.errors["bad"]
    assert served.token_ids["good"] == reference(make_model("llama"), healthy, 20).token_ids


def test_check_leaves_the_null_block_empty() -> None:
    runner = make_runner(make_model("llama"), CONFIG, attention="torch")
    runner.check()
    backend = pooled_backend(runner)
    assert all(not pool[0].any() for pool in (*backend.pool.keys, *backend.pool.values))


@pytest.mark.parametrize(("max_model_len", "block_size"), [(2, 1), (2, 16), (64, 4), (2048, 16)])
def test_a_warm_up_uses_only_the_null_block(max_model_len: int, block_size: int) -> None:
    config = EngineConfig(max_model_len=max_model_len, num_kv_blocks=4, block_size=block_size)
    runner = make_runner(make_model("llama"), config, attention="torch")
    pool = pooled_backend(runner).pool
    runner.warm_up(max_model_len, block_size)
    for blocks in (*pool.keys, *pool.values):
        assert not blocks[0].any()
        assert bool(blocks[1:].isnan().all())


def test_blocks_to_zero_are_zeroed() -> None:
    runner = make_runner(make_model("llama"), CONFIG, attention="torch")
    sequence = in_slot(0, PROMPT, [1, 2, 3, 4, 5])
    runner.execute(SchedulerOutputs(prefill=(part(sequence, 0, 4),), blocks_to_zero=(9, 10)))
    backend = pooled_backend(runner)
    assert all(not pool[9:11].any() for pool in (*backend.pool.keys, *backend.pool.values))
    assert all(bool(pool[11].isnan().all()) for pool in (*backend.pool.keys, *backend.pool.values))


class Broken:
    """A backend whose device raises an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def build_metadata(self, batch: AttentionBatch) -> AttentionMetadata:
        raise self._error

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost),
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), MemoryError),
        (RuntimeError("anything else"), RuntimeError),
        (ValueError("anything"), ValueError),
    ],
)
def test_a_lost_device_and_a_lack_of_memory_differ(error: Exception, raised: type[Exception]) -> None:
    runner: ModelRunner = make_runner(make_model("llama"), CONFIG, lambda _: Broken(error))
    sequence = in_slot(0, PROMPT, [1, 2, 3, 4, 5])
    with pytest.raises(raised):
        runner.execute(SchedulerOutputs(prefill=(part(sequence, 0, 4),)))
    with pytest.raises(raised):
        runner.check()


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16_is_close_to_the_eager_model(arch: str) -> None:
    runner = make_runner(make_model(arch, dtype=torch.bfloat16), CONFIG)
    sequence = in_slot(0, PROMPT, [1, 2, 3, 4, 5])
    chunks = [(0, 7), (7, 17), (17, 18)]
    found = torch.cat(
        [runner.execute(SchedulerOutputs(prefill=(part(sequence, at, end),))) for at, end in chunks]
    )
    assert found.dtype == torch.bfloat16
    with torch.no_grad():
        eager = make_model(arch)(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    # Eight bits of mantissa over two layers; a missing feature moves logits by about 3.
    assert float((found.float() - eager).abs().mean()) < 0.15


def test_bfloat16_serves_random_and_greedy_requests() -> None:
    requests = {
        "greedy": (PROMPT, GREEDY),
        "random": (PROMPT[:5], SamplingParams(max_tokens=20, top_p=0.9, seed=1)),
    }
    served = serve(make_runner(make_model("llama", dtype=torch.bfloat16), CONFIG), CONFIG, requests)
    assert [len(token_ids) for token_ids in served.token_ids.values()] == [20, 20]
    assert not served.errors


def test_the_sampler_reads_the_last_wanted_row_of_each_item() -> None:
    runner = make_runner(make_model("llama"), CONFIG)
    sequences = [
        in_slot(slot, PROMPT[slot:], [1 + slot, 11 + slot, 21 + slot, 5 + slot, 15 + slot]) for slot in (0, 1)
    ]
    items = (
        part(sequences[0], 0, 17 - 1, logits_from=3),
        part(sequences[1], 0, 17, logits_from=10, samples=True),
    )
    tokens = Sampler().sample(runner.execute(SchedulerOutputs(prefill=items)), items)
    assert [token.token_id for token in tokens] == [int(eager_logits(PROMPT[1:])[16].argmax())]
