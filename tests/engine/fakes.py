"""Stand-ins for device and tokenizer: real rules, no tensors."""

import itertools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import ResumedOutput, SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.requests.deadlines import NO_DEADLINES, Deadlines
from engine.requests.engine_request import EngineRequest
from engine.requests.grammar_gate import GrammarCompiler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.detokenizer import Tokenizer

VOCAB_SIZE = 1000
EOS = 999
SPECIAL = {"<eos>": EOS, "<eos2>": 998}
WORD = re.compile(r"( ?)<(\d+)>")
_arrivals = itertools.count()


class Clock:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedRunner:
    """Draws the tokens that a test wrote down for each request; without a script 100, 101, 102, ...

    `scripts`: by request id, or by "id/index" for one output of several; a negative id is an error instead.
    Doubles as its own sampler. `fault` is called with each decision and may raise. `steps` keeps, for each
    execution, (request id, start, number of new tokens) of all that was computed.
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
        self.note(outputs)

    def note(self, outputs: SchedulerOutputs) -> None:
        for item in outputs.scheduled:
            end, room = item.start + item.num_new_tokens, item.sequence.block_end
            assert end <= room, f"{item.sequence.request_id} computes up to {end} with blocks up to {room}"
        self.steps.append(
            [(item.sequence.request_id, item.start, item.num_new_tokens) for item in outputs.scheduled]
        )

    def sample(self, logits: None, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        return [self._draw(item.sequence) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: None, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        return [
            (item, _logprobs_of_prompt(item))
            for item in items
            if item.sequence.params.prompt_logprobs is not None and not item.sequence.num_output_tokens
        ]

    def _draw(self, sequence: Sequence) -> SampledToken:
        self.sample_fault(sequence)
        index = sequence.num_output_tokens
        script = self.scripts.get(f"{sequence.request_id}/{sequence.index}")
        script = script or self.scripts.get(sequence.request_id)
        token_id = 100 + index if script is None else script[min(index, len(script) - 1)]
        if token_id < 0:
            return SampledToken(None, "no number is the largest")
        wants_logprobs = sequence.params.logprobs is not None
        return SampledToken(
            token_id, logprobs=TokenLogprobs(token_id, -float(index)) if wants_logprobs else None
        )


class ScriptedLauncher:
    """Launches on a `ScriptedRunner`: a step's tokens are there when they are fetched, and not before.

    Takes what wants neither log-probabilities nor a grammar. `fault` and `fetch_fault` are called with what
    is launched and fetched, and may raise. `events`: ("launch" or "fetch", number of the step) in order.
    """

    def __init__(self, runner: ScriptedRunner) -> None:
        self.runner = runner
        self.fault: Callable[[SchedulerOutputs], None] = lambda _: None
        self.fetch_fault: Callable[[SchedulerOutputs], None] = lambda _: None
        self.events: list[tuple[str, int]] = []
        #: What each token was, as far as it was computed: by request, by output, by place.
        self.seen: dict[tuple[str, int], dict[int, int]] = {}
        self._num_launched = 0

    def takes(self, item: ScheduledSequence) -> bool:
        params, grammar = item.sequence.params, item.sequence.constraints.grammar
        return params.logprobs is None and params.prompt_logprobs is None and grammar is None

    def launch(self, outputs: SchedulerOutputs, after: "Launched | None") -> "Launched":
        self.fault(outputs)
        self.runner.note(outputs)
        for item in outputs.scheduled:
            self._note(item, after)
        self._num_launched += 1
        self.events.append(("launch", self._num_launched))
        drawn = self.runner.sample(None, outputs.scheduled)
        return Launched(self._num_launched, outputs, drawn)

    def _note(self, item: ScheduledSequence, after: "Launched | None") -> None:
        sequence = item.sequence
        seen = self.seen.setdefault((sequence.request_id, sequence.index), {})
        for place in range(item.start, item.start + item.num_new_tokens):
            token_id: int | None = sequence.token_ids[place]
            assert token_id is not None
            if token_id < 0:
                assert after is not None, "a stand-in for nothing"
                token_id = after.drawn[-1 - token_id].token_id
            seen[place] = 0 if token_id is None else token_id

    def fetch(self, launched: "Launched") -> list[SampledToken]:
        self.events.append(("fetch", launched.number))
        self.fetch_fault(launched.outputs)
        return launched.drawn


class Launched(NamedTuple):
    number: int
    outputs: SchedulerOutputs
    drawn: list[SampledToken]


def _logprobs_of_prompt(item: ScheduledSequence) -> list[TokenLogprobs]:
    """Made-up ones: of token i of a prompt, -i."""
    sequence = item.sequence
    places = range(item.start + item.logits_from + 1, item.start + item.num_new_tokens + 1)
    return [
        TokenLogprobs(sequence.token_ids[place], -float(place))
        for place in places
        if place < sequence.num_prompt_tokens
    ]


class WordTokenizer:
    """Each id is a word of its own."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        skipped = SPECIAL.values() if skip_special_tokens else ()
        written = {token_id: text for text, token_id in SPECIAL.items()}
        return "".join(written.get(one, f"<{one}>") for one in token_ids if one not in skipped)

    def spelling(self, skip_special_tokens: bool = True) -> None:
        """Decoded in windows."""

    def encode_text(self, text: str) -> list[int]:
        """Written as it is decoded; a space before makes another word of it."""
        return [500 + int(number) if space else int(number) for space, number in WORD.findall(text)]

    def special_token_id(self, text: str) -> int | None:
        return SPECIAL.get(text)


class PieceTokenizer:
    """Ids are places in a list of texts; the last `num_special` of these are special tokens."""

    def __init__(self, *pieces: str, num_special: int = 0) -> None:
        self.pieces = pieces
        first = len(pieces) - num_special
        self.special = {text: first + n for n, text in enumerate(pieces[first:])}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special.values() if skip_special_tokens else ()
        return "".join(self.pieces[one] for one in token_ids if one not in skipped)

    def spelling(self, skip_special_tokens: bool = True) -> None:
        """Decoded in windows."""

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
    launcher: ScriptedLauncher | None = None,
    **limits: int,
) -> tuple[Engine, ScriptedRunner]:
    config = EngineConfig(**{"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, **limits})
    runner = runner or (launcher.runner if launcher else ScriptedRunner())
    engine = Engine(
        config,
        runner,
        runner,
        tokenizer or WordTokenizer(),
        eos_token_ids=eos_token_ids,
        vocab_size=VOCAB_SIZE,
        grammar_compiler=grammar_compiler,
        async_executor=launcher,
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
    """Put a request of `prompt_len` tokens in line, after all that came before; no two begin alike."""
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
    """Step until nothing is left: of each output its tokens, its text and its end.

    Outputs are called by their request's id, those after the first "id/index".
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
            assert name not in ends, "something after the end"
            if output.token_id is not None:
                ids.append(output.token_id)
            texts[name] = texts.get(name, "") + output.text + output.held_text
            if output.finish_reason:
                ends[name] = output.finish_reason.value
    raise AssertionError(f"not done after {max_steps} steps")


def words(token_ids: Iterable[int]) -> str:
    """The text of `token_ids` in `WordTokenizer`'s words."""
    return "".join(f"<{token_id}>" for token_id in token_ids)
