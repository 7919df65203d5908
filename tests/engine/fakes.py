"""Fakes of the device, the clock and the tokenizer; the rest of the engine is real."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import ResumedOutput, SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.requests.deadlines import NO_DEADLINES, Deadlines
from engine.requests.engine_request import EngineRequest
from engine.requests.grammar_gate import GrammarCompiler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.detokenizer import NO_END_TEXTS, Detokenizer, Tokenizer

VOCAB_SIZE = 1000
EOS = 999
SPECIAL = {"<eos>": EOS, "<eos2>": 998}
WORD = re.compile(r"( ?)<(\d+)>")
_arrivals = itertools.count()


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedRunner:
    """A runner and sampler whose tokens a test defines; the default is 100, 101, 102, ...

    `scripts`: token ids by request id, or by "id/index" for one output of several; a negative id is an error
    instead. `fault` is called with each decision, `sample_fault` with each sequence; both may raise. `steps`:
    for each execution, (request id, start, number of new tokens) of every scheduled sequence.
    """

    def __init__(self, scripts: dict[str, list[int]] | None = None) -> None:
        self.scripts = scripts or {}
        self.steps: list[list[tuple[str, int, int]]] = []
        self.fault: Callable[[SchedulerOutputs], None] = lambda _: None
        self.sample_fault: Callable[[Sequence], None] = lambda _: None
        self.check: Callable[[], None] = lambda: None
        self.release_memory: Callable[[], bool] = lambda: False

    def execute(self, outputs: SchedulerOutputs) -> None:
        self.fault(outputs)
        self.record(outputs)

    def record(self, outputs: SchedulerOutputs) -> None:
        for item in outputs.without_drafts().scheduled:
            end, limit = item.start + item.num_new_tokens, item.sequence.block_end
            assert end <= limit, f"{item.sequence.request_id} computes {end} tokens with blocks for {limit}"
        self.steps.append(
            [(item.sequence.request_id, item.start, item.num_new_tokens) for item in outputs.scheduled]
        )

    def sample(self, logits: None, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        return [self.sample_token(item.sequence, item.output_index) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: None, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        return [
            (item, _logprobs_of_prompt(item))
            for item in items
            if item.sequence.params.prompt_logprobs is not None and not item.sequence.num_output_tokens
        ]

    def sample_token(self, sequence: Sequence, index: int) -> SampledToken:
        self.sample_fault(sequence)
        script = self.scripts.get(f"{sequence.request_id}/{sequence.index}")
        script = script or self.scripts.get(sequence.request_id)
        token_id = 100 + index if script is None else script[min(index, len(script) - 1)]
        if token_id < 0:
            return SampledToken(None, "the logits are not finite")
        wants_logprobs = sequence.params.logprobs is not None
        return SampledToken(
            token_id, logprobs=TokenLogprobs(token_id, -float(index)) if wants_logprobs else None
        )


class ScriptedExecutor:
    """An asynchronous executor on a `ScriptedRunner`: tokens are available only once they are fetched.

    Accepts sequences without logprobs and grammar. `fault` and `fetch_fault` are called with the decision
    that is launched or fetched, and may raise. `events`: ("launch" or "fetch", number of the step) in order.
    """

    def __init__(self, runner: ScriptedRunner) -> None:
        self.runner = runner
        self.fault: Callable[[SchedulerOutputs], None] = lambda _: None
        self.fetch_fault: Callable[[SchedulerOutputs], None] = lambda _: None
        self.events: list[tuple[str, int]] = []
        #: The computed token ids by position, by (request id, output).
        self.seen: dict[tuple[str, int], dict[int, int]] = {}
        self._num_launched = 0

    def can_launch(self, item: ScheduledSequence) -> bool:
        params, grammar = item.sequence.params, item.sequence.constraints.grammar
        return params.logprobs is None and params.prompt_logprobs is None and grammar is None

    def launch(self, outputs: SchedulerOutputs, after: "Launched | None") -> "Launched":
        self.fault(outputs)
        self.runner.record(outputs)
        for item in outputs.scheduled:
            self._record(item, after)
        self._num_launched += 1
        self.events.append(("launch", self._num_launched))
        sampled = self.runner.sample(None, outputs.scheduled)
        return Launched(self._num_launched, outputs, sampled)

    def _record(self, item: ScheduledSequence, after: "Launched | None") -> None:
        sequence = item.sequence
        seen = self.seen.setdefault((sequence.request_id, sequence.index), {})
        for position in range(item.start, item.start + item.num_new_tokens):
            token_id: int | None = sequence.token_ids[position]
            assert token_id is not None
            if token_id < 0:
                assert after is not None, "a placeholder without a step before it"
                token_id = after.sampled[-1 - token_id].token_id
            seen[position] = 0 if token_id is None else token_id

    def fetch(self, launched: "Launched") -> list[SampledToken]:
        self.events.append(("fetch", launched.number))
        self.fetch_fault(launched.outputs)
        return launched.sampled


class Launched(NamedTuple):
    number: int
    outputs: SchedulerOutputs
    sampled: list[SampledToken]


def _logprobs_of_prompt(item: ScheduledSequence) -> list[TokenLogprobs]:
    """Logprob -i for token i of a prompt."""
    sequence = item.sequence
    end = min(item.start + item.num_new_tokens + 1, sequence.num_prompt_tokens)
    return [
        TokenLogprobs(sequence.token_ids[position], -float(position))
        for position in range(item.start + item.logits_from + 1, end)
    ]


class WordTokenizer:
    """Each id is a word."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        skipped = SPECIAL.values() if skip_special_tokens else ()
        written = {token_id: text for text, token_id in SPECIAL.items()}
        return "".join(written.get(one, f"<{one}>") for one in token_ids if one not in skipped)

    def decoded_bytes(self, skip_special_tokens: bool = True) -> None:
        """None: text is decoded in windows."""

    def encode_text(self, text: str) -> list[int]:
        """The inverse of `decode`; a word after a space has another id."""
        return [500 + int(number) if space else int(number) for space, number in WORD.findall(text)]

    def special_token_id(self, text: str) -> int | None:
        return SPECIAL.get(text)


class PieceTokenizer:
    """Ids are indexes into `pieces`; the last `num_special` are special tokens."""

    def __init__(self, *pieces: str, num_special: int = 0) -> None:
        self.pieces = pieces
        first = len(pieces) - num_special
        self.special = {text: first + n for n, text in enumerate(pieces[first:])}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special.values() if skip_special_tokens else ()
        return "".join(self.pieces[one] for one in token_ids if one not in skipped)

    def decoded_bytes(self, skip_special_tokens: bool = True) -> None:
        """None: text is decoded in windows."""

    def encode_text(self, text: str) -> list[int]:
        return [self.pieces.index(text)] if text in self.pieces else []

    def special_token_id(self, text: str) -> int | None:
        return self.special.get(text)


def build_engine(
    runner: ScriptedRunner | None = None,
    clock: Clock | None = None,
    grammar_compiler: GrammarCompiler | None = None,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] = frozenset({EOS}),
    executor: ScriptedExecutor | None = None,
    **limits: Any,
) -> tuple[Engine, ScriptedRunner]:
    config = EngineConfig(**{"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, **limits})
    runner = runner or (executor.runner if executor else ScriptedRunner())
    engine = Engine(
        config,
        runner,
        runner,
        tokenizer or WordTokenizer(),
        eos_token_ids=eos_token_ids,
        vocab_size=VOCAB_SIZE,
        grammar_compiler=grammar_compiler,
        async_executor=executor,
        clock=clock or Clock(),
    )
    return engine, runner


def add(
    engine: Engine,
    request_id: str,
    prompt_len: int,
    *,
    priority: int = 2,
    deadlines: Deadlines = NO_DEADLINES,
    resumed: tuple[ResumedOutput, ...] = (),
    waited_seconds: float = 0.0,
    **params: object,
) -> None:
    """Add a request of `prompt_len` tokens after all earlier ones. No two prompts share a prefix."""
    arrival = next(_arrivals)
    engine.add(
        EngineRequest(
            request_id,
            [1 + arrival % 900, *range(1, prompt_len)],
            SamplingParams(**params),  # type: ignore[arg-type]  # tests pass what users may
            arrival_time=float(arrival),
            priority=priority,
            deadlines=deadlines,
            resumed=resumed,
            waited_seconds=waited_seconds,
        )
    )


def run(engine: Engine, max_steps: int = 500) -> dict[str, tuple[list[int], str, str | None]]:
    """Step until no work is left. Returns tokens, text and finish reason of each output.

    The key of an output is its request id, or "id/index" if the index is not 0.
    """
    tokens: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    ends: dict[str, str | None] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return {one: (tokens[one], texts[one], ends.get(one)) for one in tokens}
        for output in engine.step().outputs:
            name = f"{output.request_id}/{output.index}" if output.index else output.request_id
            ids = tokens.setdefault(name, [])
            assert name not in ends, "an output after the end"
            if output.token_id is not None:
                ids.append(output.token_id)
            texts[name] = texts.get(name, "") + output.text + output.held_text
            if output.finish_reason:
                ends[name] = output.finish_reason.value
    raise AssertionError(f"unfinished after {max_steps} steps")


def final_text(
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    output_token_ids: list[int],
    params: SamplingParams,
    *,
    end_token_id: int | None = None,
    end_texts: Mapping[int, str] = NO_END_TEXTS,
) -> str:
    """The text of a finished output, cut at its stop string. `output_token_ids`: without the end token."""
    detokenizer = Detokenizer(tokenizer, prompt_token_ids, params, end_texts)
    return "".join(map(detokenizer.push, output_token_ids)) + detokenizer.close(end_token_id)


def words(token_ids: Iterable[int]) -> str:
    """The text of `token_ids` by `WordTokenizer`."""
    return "".join(f"<{token_id}>" for token_id in token_ids)
