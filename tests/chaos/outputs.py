"""Checks tokens and texts of finished requests against a reference.

Each token, greedy or sampled, with or without a grammar, must follow from logits that `transformers` computes
in one pass over all tokens before it, independently of the service. A difference that rounding in float32
explains is a near tie, of which a few are allowed. Any other difference is a fault.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.constraints import Grammar
from engine.execution.machine.library_messages import quiet_transformers
from engine.execution.text.llguidance_backend import LlguidanceBackend
from engine.execution.text.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams
from engine.structured_outputs import StructuredOutputs
from engine.text.detokenizer import Detokenizer
from tests.chaos.draws import Draws
from tests.chaos.ledger import Problem
from tests.chaos.workload import Request
from tests.tiny_models import EOS, IM_END, VOCAB_SIZE
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent

ENDS = (EOS, IM_END)


@dataclass(frozen=True, slots=True)
class Answer:
    """An output of a request. `reason`: why it ended; `index`: its number in the request."""

    token_ids: list[int]
    text: str
    reason: str
    index: int = 0


def answers_of(events: Sequence[Event]) -> list[Answer]:
    """One answer for each output of a request, from its whole log."""
    return [
        _answer([event for event in events if event.index == index], index)
        for index in sorted({event.index for event in events})
    ]


def _answer(events: Sequence[Event], index: int) -> Answer:
    tokens = [event.token for event in events if isinstance(event, TokenEvent)]
    ends = [event for event in events if isinstance(event, FinishedEvent)]
    reason = ends[-1].finish_reason if ends else ""
    return Answer(tokens, "".join(event.text for event in events), reason, index)


def few_enough(num_near_ties: int, num_requests: int) -> bool:
    """At most one, or one in a hundred, as in `tests.comparer`."""
    return num_near_ties <= max(1, num_requests // 100)


class OutputChecker:
    """Checks outputs of the model in `model_dir`. `near_ties`: one line for each."""

    def __init__(self, model_dir: Path) -> None:
        self.near_ties: list[str] = []
        with quiet_transformers():
            model: Any = AutoModelForCausalLM.from_pretrained(
                model_dir, attn_implementation="eager", dtype=torch.float32
            )
        self._model = model.eval()
        self._tokenizer = Tokenizer.load(model_dir)
        self._grammars = LlguidanceBackend(
            self._tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(ENDS)
        )

    def check(self, answers: Iterable[tuple[Request, Answer]]) -> list[Problem]:
        """The faults in tokens, text and finish reason of each answer."""
        return [
            Problem("lost", f"{request}: {fault}")
            for request, answer in answers
            if (fault := self._fault(request, answer))
        ]

    def _fault(self, request: Request, answer: Answer) -> str | None:
        if fault := self._token_fault(request, answer):
            return fault
        text, length, reason = self._undisturbed(request, answer.token_ids)
        if answer.reason == "cancelled":
            # Text that was held back is dropped.
            return None if text.startswith(answer.text) else "its text is not that of its tokens"
        if (len(answer.token_ids), answer.reason) != (length, reason):
            return (
                f"it has {len(answer.token_ids)} tokens and ended with {answer.reason or 'nothing'};"
                f" undisturbed it ends with {reason or 'nothing yet'} at {length}"
            )
        return None if answer.text == text else "its text is not that of its tokens"

    def _token_fault(self, request: Request, answer: Answer) -> str | None:
        token_ids = answer.token_ids
        if not token_ids:
            return None
        prompt = self._prompt(request)
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([prompt + token_ids]), use_cache=False)
        rows = output.logits[0, len(prompt) - 1 : -1]
        draws = Draws(request.body, answer.index, self._grammar(request))
        for place, row in enumerate(rows):
            choice = draws.choice(row, token_ids[: place + 1])
            if not choice.is_possible:
                return f"token {place} of {len(token_ids)} is not the one that is drawn, by {choice.lead:.2g}"
            if choice.lead > 0:
                self.near_ties.append(f"{request}: token {place}, by {choice.lead:.2g}")
        return None

    def _grammar(self, request: Request) -> Grammar | None:
        asked = request.body.get("structured_outputs")
        return None if asked is None else self._grammars.compile(StructuredOutputs.from_json(asked))()

    def _prompt(self, request: Request) -> list[int]:
        body = request.body
        if "messages" in body:
            return self._tokenizer.render_chat(body["messages"])
        return list(body["prompt_token_ids"]) if "prompt_token_ids" in body else self._encode(body["prompt"])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def _undisturbed(self, request: Request, token_ids: list[int]) -> tuple[str, int, str]:
        """Text, length and finish reason of these tokens in an undisturbed run."""
        body = request.body
        grammar = self._grammar(request)
        detokenizer = Detokenizer(
            self._tokenizer, self._prompt(request), SamplingParams(stop=tuple(body.get("stop", ())))
        )
        text, reason, length = "", "", 0
        for token_id in token_ids:
            length += 1
            if token_id in ENDS and not body.get("ignore_eos"):
                reason = "stop"
                break
            text += detokenizer.push(token_id)
            if detokenizer.stopped or _is_complete(grammar, token_ids[:length]):
                reason = "stop"
                break
            if length == body["max_tokens"]:
                reason = "length"
                break
        return text + detokenizer.close(), length, reason


def _is_complete(grammar: Grammar | None, token_ids: list[int]) -> bool:
    if grammar is None:
        return False
    grammar.advance(token_ids)
    return grammar.is_complete
