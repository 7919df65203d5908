"""Lists of prompts: all or none run, results are in order, and the engine is empty afterwards."""

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import engine as package
from engine.engine import Engine
from engine.errors import EngineDead, InvalidParameter, NeverFits
from engine.offline.interrupts import delayed_interrupt
from engine.offline.runner import CompletionOutput, OfflineRunner, RequestOutput
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from tests.engine.fakes import EOS, ScriptedRunner, build_engine, words

TWO = SamplingParams(max_tokens=2)


class Offline(OfflineRunner):
    """A runner that shows its engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.engine = engine


def build(runner: ScriptedRunner | None = None, **limits: Any) -> tuple[Offline, ScriptedRunner]:
    engine, runner = build_engine(runner, **limits)
    return Offline(engine), runner


def assert_idle(offline: Offline) -> None:
    engine = offline.engine
    assert not engine.has_work
    assert engine.num_tracked == 0
    assert engine.scheduler.block_manager.num_free_blocks == engine.config.num_kv_blocks
    (again,) = offline.run([[1]], [TWO])
    assert again.outputs[0].token_ids == [100, 101]


def test_results_are_in_the_order_of_the_prompts() -> None:
    offline, _ = build(max_num_seqs=2)
    lengths = [9, 1, 4, 2, 7]
    prompts = [[n] * n for n in lengths]

    results = offline.run(prompts, [SamplingParams(max_tokens=n) for n in lengths])

    assert [one.prompt_token_ids for one in results] == prompts
    assert [len(one.outputs[0].token_ids) for one in results] == lengths
    assert [one.outputs[0].text for one in results] == [words(range(100, 100 + n)) for n in lengths]
    assert_idle(offline)


def test_a_result_has_everything_requested() -> None:
    runner = ScriptedRunner({"prompt-0/0": [5, 6, EOS], "prompt-0/1": [5, 7, 8]})
    offline, _ = build(runner)
    params = SamplingParams(n=2, max_tokens=3, stop=("<6><9",), logprobs=0, prompt_logprobs=0)

    (result,) = offline.run([[1, 2]], [params])

    assert result == RequestOutput(
        prompt_token_ids=[1, 2],
        outputs=[
            CompletionOutput(
                index=0,
                text="<5><6>",
                token_ids=[5, 6, EOS],
                finish_reason="stop",
                logprobs=[TokenLogprobs(5, 0.0), TokenLogprobs(6, -1.0), TokenLogprobs(EOS, -2.0)],
            ),
            CompletionOutput(
                index=1,
                text="<5><7><8>",
                token_ids=[5, 7, 8],
                finish_reason="length",
                logprobs=[TokenLogprobs(5, 0.0), TokenLogprobs(7, -1.0), TokenLogprobs(8, -2.0)],
            ),
        ],
        prompt_logprobs=[None, TokenLogprobs(2, -1.0)],
    )
    assert result.error is None


def test_a_prompt_that_fails_has_an_error_and_the_others_have_texts() -> None:
    offline, runner = build()

    def fault(sequence: object) -> None:
        if getattr(sequence, "request_id", "") == "prompt-1":
            raise ValueError("bad")

    runner.sample_fault = fault

    results = offline.run([[1], [2], [3]], [TWO] * 3)

    assert [one.error for one in results] == [None, "ValueError: bad", None]
    assert [one.outputs[0].finish_reason for one in results] == ["length", "error", "length"]
    assert_idle(offline)


@pytest.mark.parametrize(
    ("bad", "params", "error", "message"),
    [
        ([1] * 48, TWO, NeverFits, r"prompt 2: prompt: has 48 tokens"),
        ([], TWO, InvalidParameter, r"prompt 2: prompt: must have"),
        ([-1], TWO, InvalidParameter, r"prompt 2: prompt: token id -1"),
        ([1], SamplingParams(stop_token_ids=(9999,)), InvalidParameter, r"prompt 2: stop_token_ids: "),
    ],
)
def test_an_invalid_prompt_is_reported_by_position_before_any_runs(
    bad: list[int], params: SamplingParams, error: type[Exception], message: str
) -> None:
    offline, runner = build()

    with pytest.raises(error, match=message):
        offline.run([[1], [2], bad, [3]], [TWO, TWO, params, TWO])

    assert runner.steps == []
    assert_idle(offline)


def test_no_prompts_return_no_results() -> None:
    offline, _ = build()

    assert offline.run([], []) == []


def test_progress_counts_each_finish_and_each_token_once() -> None:
    offline, _ = build(max_num_seqs=2)
    calls: list[tuple[int, int]] = []

    offline.run([[1], [2], [3]], [TWO] * 3, lambda ended, tokens: calls.append((ended, tokens)))

    assert (sum(ended for ended, _ in calls), sum(tokens for _, tokens in calls)) == (3, 6)


def test_ctrl_c_ends_the_run_after_a_step_and_the_engine_is_reusable() -> None:
    offline, runner = build()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(_: object) -> None:
        if len(runner.steps) == 1:
            signal.raise_signal(signal.SIGINT)

    runner.fault = interrupt

    with pytest.raises(KeyboardInterrupt):
        offline.run([[1], [2]], [SamplingParams(max_tokens=9)] * 2)

    assert len(runner.steps) == 2, "the interrupted step was completed"
    assert signal.getsignal(signal.SIGINT) is before
    runner.fault = lambda _: None
    assert_idle(offline)


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_other_threads_run_without_signal_handlers() -> None:
    offline, _ = build()
    results: list[RequestOutput] = []

    thread = threading.Thread(target=lambda: results.extend(offline.run([[1]], [TWO])))
    thread.start()
    thread.join()

    assert [one.outputs[0].token_ids for one in results] == [[100, 101]]


def test_a_dead_engine_raises_and_holds_no_requests() -> None:
    offline, runner = build()

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    runner.fault = runner.check = broken

    with pytest.raises(EngineDead):
        offline.run([[1], [2]], [TWO] * 2)

    assert not offline.engine.has_work


def test_importing_the_package_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, engine; assert 'LLM' in dir(engine)\n"
        "from engine import SamplingParams, RequestOutput\n"
        "assert SamplingParams(n=2).n == 2\n"
        "heavy = {'torch', 'transformers', 'tqdm', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_exports_exactly_its_public_names() -> None:
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LM'"):
        package.LM  # noqa: B018 - the access itself is tested
