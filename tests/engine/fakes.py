"""Stand-ins for device and tokenizer: real rules, no tensors."""

import itertools
from collections.abc import Callable, Iterable

from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

VOCAB_SIZE = 1000
EOS = 999
_arrivals = itertools.count()


class Clock:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedRunner:
    """Draws the tokens that a test wrote down for each request; without a script 100, 101, 102, ...

    Doubles as its own sampler. `fault` is called with each decision and may raise. `steps` keeps, for each
    execution, (request id, start, number of new tokens) of all that was computed.
    """

    def __init__(self, scripts: dict[str, list[int]] | None = None) -> None:
        self.scripts = scripts or {}
        self.steps: list[list[tuple[str, int, int]]] = []
        self.fault: Callable[[SchedulerOutputs], None] = lambda _: None
        self.sample_fault: Callable[[Sequence], None] = lambda _: None
        self.check: Callable[[], None] = lambda: None

    def execute(self, outputs: SchedulerOutputs) -> None:
        self.fault(outputs)
        self.steps.append(
            [(item.sequence.request_id, item.start, item.num_new_tokens) for item in outputs.scheduled]
        )

    def sample(self, logits: None, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        return [self._draw(item.sequence) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: None, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        return []

    def _draw(self, sequence: Sequence) -> SampledToken:
        self.sample_fault(sequence)
        index = sequence.num_output_tokens
        script = self.scripts.get(sequence.request_id)
        return SampledToken(100 + index if script is None else script[min(index, len(script) - 1)])


class WordTokenizer:
    """Each id is a word of its own."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids if token_id != EOS)


def build_engine(
    runner: ScriptedRunner | None = None, clock: Clock | None = None, **limits: int
) -> tuple[Engine, ScriptedRunner]:
    config = EngineConfig(**{"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, **limits})
    runner = runner or ScriptedRunner()
    engine = Engine(
        config,
        runner,
        runner,
        WordTokenizer(),
        eos_token_ids=frozenset({EOS}),
        vocab_size=VOCAB_SIZE,
        clock=clock or Clock(),
    )
    return engine, runner


def add(engine: Engine, request_id: str, prompt_len: int, *, priority: int = 2, **params: object) -> None:
    """Put a request of `prompt_len` tokens in line, after all that came before; no two begin alike."""
    arrival = next(_arrivals)
    engine.add(
        request_id,
        [1 + arrival % 900, *range(1, prompt_len)],
        SamplingParams(**params),  # type: ignore[arg-type]  # tests pass what users may
        arrival=float(arrival),
        priority=priority,
    )


def run(engine: Engine, max_steps: int = 500) -> dict[str, tuple[list[int], str, str | None]]:
    """Step until nothing is left: of each request its tokens, its text and its end."""
    tokens: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    ends: dict[str, str | None] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return {one: (tokens[one], texts[one], ends.get(one)) for one in tokens}
        for output in engine.step().outputs:
            ids = tokens.setdefault(output.request_id, [])
            if output.token_id is not None:
                ids.append(output.token_id)
            text = texts.get(output.request_id, "") + output.text + output.held_text
            texts[output.request_id] = text
            if output.finish_reason:
                assert output.request_id not in ends, "two ends"
                ends[output.request_id] = output.finish_reason.value
    raise AssertionError(f"not done after {max_steps} steps")


def words(token_ids: Iterable[int]) -> str:
    """The text of `token_ids` in `WordTokenizer`'s words."""
    return "".join(f"<{token_id}>" for token_id in token_ids)
