"""The floor of a workload, worked out by hand on a model of round numbers."""

import pytest

from benchmarks.serving.protocol import Request
from benchmarks.serving.roofline import Part, Rates, floor_seconds, flops, step_seconds, steps
from benchmarks.serving.shapes import Shape, shape_of
from benchmarks.serving.workloads import Workload

SHAPE = Shape(vocab_size=100, layer_weights=1000, head_weights=200, kv_elements=10, score_elements=5)
READS = Rates(weights_bytes_per_second=100.0, memory_bytes_per_second=10.0, flops_per_second=1e12)
COMPUTES = Rates(weights_bytes_per_second=1e12, memory_bytes_per_second=1e12, flops_per_second=10.0)


def workload(*sizes: tuple[int, int], shared_tokens: int = 0) -> Workload:
    requests = tuple(Request([1] * prompt, output) for prompt, output in sizes)
    return Workload(name="made", requests=requests, shared_tokens=shared_tokens)


def planned(work: Workload, token_budget: int = 8, max_seqs: int = 4) -> list[list[tuple[int, int, bool]]]:
    return [
        [(part.computed, part.new, part.samples) for part in parts]
        for parts in steps(work, token_budget=token_budget, max_seqs=max_seqs)
    ]


def test_a_prompt_is_computed_at_once_and_then_token_by_token() -> None:
    assert planned(workload((5, 3))) == [[(0, 5, True)], [(5, 1, True)], [(6, 1, True)]]


def test_decodes_go_first_and_prompts_take_what_is_left_of_the_budget() -> None:
    assert planned(workload((6, 3), (6, 1))) == [
        [(0, 6, True), (0, 2, False)],
        [(6, 1, True), (2, 4, True)],
        [(7, 1, True)],
    ]


def test_no_more_sequences_than_slots() -> None:
    assert all(len(parts) <= 2 for parts in planned(workload(*[(1, 2)] * 5), max_seqs=2))


def test_a_shared_prefix_is_computed_once() -> None:
    assert planned(workload((5, 1), (5, 1), shared_tokens=4)) == [[(0, 5, True), (4, 1, True)]]


def test_every_output_token_is_in_the_plan_once() -> None:
    work = workload((3, 4), (17, 2), (1, 9))
    assert sum(samples for parts in planned(work) for _, _, samples in parts) == work.num_output_tokens


def test_a_decode_step_reads_the_weights_and_the_context() -> None:
    # 1,200 weights and a context of 3 tokens of 10 elements, 4 bytes each.
    assert step_seconds([Part(2, 1, True)], SHAPE, READS, "float32") == pytest.approx(4800 / 100 + 120 / 10)
    assert step_seconds([Part(2, 1, True)], SHAPE, READS, "bfloat16") == pytest.approx(2400 / 100 + 60 / 10)


def test_a_step_that_samples_nothing_does_not_read_the_output_layer() -> None:
    assert step_seconds([Part(0, 1, False)], SHAPE, READS, "float32") == pytest.approx(4000 / 100 + 40 / 10)


def test_a_shared_prefix_is_read_once_for_all() -> None:
    parts = [Part(4, 1, True), Part(5, 1, True)]
    alone = step_seconds(parts, SHAPE, READS, "float32")
    shared = step_seconds(parts, SHAPE, READS, "float32", shared_tokens=4)
    assert alone - shared == pytest.approx(4 * 10 * 4 / 10)


def test_operations_of_weights_and_of_attention() -> None:
    # Two tokens after three: they attend to 4 and 5 tokens.
    assert flops([Part(3, 2, True)], SHAPE) == 2 * 2 * 1000 + 2 * 200 + 4 * 9 * 5


def test_the_longer_of_reading_and_computing_counts() -> None:
    part = [Part(3, 2, True)]
    assert step_seconds(part, SHAPE, COMPUTES, "float32") == pytest.approx(flops(part, SHAPE) / 10)


def test_the_floor_is_the_sum_of_the_steps() -> None:
    floor = floor_seconds(workload((2, 2)), SHAPE, READS, "float32", token_budget=8, max_seqs=4)
    assert floor == pytest.approx((48 + 8) + (48 + 12))


def test_sizes_of_a_real_config() -> None:
    """SmolLM2-135M has 134,515,008 parameters, of which 35,136 are norms."""
    shape = shape_of(
        {
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
        }
    )
    assert shape.weights == 134_515_008 - 61 * 576
    assert shape.kv_elements == 30 * 2 * 3 * 64
    assert shape.score_elements == 30 * 576
