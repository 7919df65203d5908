"""Is this what the model says when nothing disturbs it? Judges the tokens and texts of finished requests.

Law: each greedy token must be the likeliest one after all before it, computed at one go by `transformers` in
float32, so that no step of the service is asked about itself; where it is not, but closer than `NEAR_TIE`, it
is a near tie, of which few may be. What was sampled must come out the same once more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.detokenizer import Detokenizer
from engine.execution.quiet import quiet_transformers
from engine.execution.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams
from tests.chaos.errands import Errand
from tests.chaos.ledger import Problem
from tests.comparer import NEAR_TIE
from tests.tiny_models import EOS, IM_END
from worker.protocol.messages import Event, FinishedEvent, TokenEvent


@dataclass(frozen=True, slots=True)
class Answer:
    """One output of a request: what was said, and why it ended."""

    token_ids: list[int]
    text: str
    reason: str


def answers_of(events: Sequence[Event]) -> list[Answer]:
    """One for each output of a request, from its whole log."""
    return [
        _answer([event for event in events if event.index == index])
        for index in sorted({event.index for event in events})
    ]


def _answer(events: Sequence[Event]) -> Answer:
    tokens = [event.token for event in events if isinstance(event, TokenEvent)]
    ends = [event for event in events if isinstance(event, FinishedEvent)]
    return Answer(tokens, "".join(event.text for event in events), ends[-1].finish_reason if ends else "")


def few_enough(num_near_ties: int, num_requests: int) -> bool:
    """As in `tests.comparer`: one, or one in a hundred."""
    return num_near_ties <= max(1, num_requests // 100)


class Judge:
    """Knows the model in `model_dir`. `near_ties`: one line for each that was met."""

    def __init__(self, model_dir: Path) -> None:
        self.near_ties: list[str] = []
        with quiet_transformers():
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                model_dir, attn_implementation="eager", dtype=torch.float32
            ).eval()
        self._tokenizer = Tokenizer.load(model_dir)

    def judge(self, answers: Iterable[tuple[Errand, Answer]]) -> list[Problem]:
        """What is wrong with each answer; of a sampled one, whether text and end are those of its tokens."""
        return [
            Problem("lost", f"{errand}: {fault}")
            for errand, answer in answers
            if (fault := self._fault(errand, answer))
        ]

    def compare(self, name: str, found: Answer, again: Answer) -> Problem | None:
        """Two answers to one body. A cancelled one is a beginning of the other."""
        is_cut = found.reason == "cancelled"
        right = again.token_ids[: len(found.token_ids)] if is_cut else again.token_ids
        if found.token_ids != right or (not is_cut and found != again):
            place = _first_difference(found.token_ids, again.token_ids)
            return Problem("lost", f"{name}: another text when all is calm, from token {place} on")
        return None

    def _fault(self, errand: Errand, answer: Answer) -> str | None:
        if errand.is_greedy and (fault := self._greedy_fault(errand, answer.token_ids)):
            return fault
        if "structured_outputs" in errand.body:
            return None  # where its grammar ends is not known here
        text, length, reason = self._undisturbed(errand, answer.token_ids)
        if answer.reason == "cancelled":
            # What it had held back is dropped.
            return None if text.startswith(answer.text) else "its text is not that of its tokens"
        if (len(answer.token_ids), answer.reason) != (length, reason):
            return (
                f"it has {len(answer.token_ids)} tokens and ended with {answer.reason or 'nothing'};"
                f" undisturbed it ends with {reason or 'nothing yet'} at {length}"
            )
        return None if answer.text == text else "its text is not that of its tokens"

    def _greedy_fault(self, errand: Errand, token_ids: list[int]) -> str | None:
        prompt = self._prompt(errand)
        if not token_ids:
            return None
        with torch.inference_mode():
            told = self._model(input_ids=torch.tensor([prompt + token_ids]), use_cache=False)
        rows = told.logits[0, len(prompt) - 1 : -1].float()
        leads = rows.max(dim=-1).values - rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        for place, lead in enumerate(leads.tolist()):
            if lead >= NEAR_TIE:
                return f"token {place} of {len(token_ids)} is not the likeliest, by {lead:.2g}"
            if lead > 0:
                self.near_ties.append(f"{errand}: token {place}, by {lead:.2g}")
        return None

    def _prompt(self, errand: Errand) -> list[int]:
        body = errand.body
        if "messages" in body:
            return self._tokenizer.render_chat(body["messages"])
        return list(body["prompt_token_ids"]) if "prompt_token_ids" in body else self._encode(body["prompt"])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def _undisturbed(self, errand: Errand, token_ids: list[int]) -> tuple[str, int, str]:
        """The text of these tokens, up to where a run of its own would have ended, and why there."""
        body = errand.body
        detokenizer = Detokenizer(
            self._tokenizer, self._prompt(errand), SamplingParams(stop=tuple(body.get("stop", ())))
        )
        text, reason, length = "", "", 0
        for token_id in token_ids:
            length += 1
            if token_id in (EOS, IM_END) and not body.get("ignore_eos"):
                reason = "stop"
                break
            text += detokenizer.push(token_id)
            if detokenizer.stopped or length == body["max_tokens"]:
                reason = "stop" if detokenizer.stopped else "length"
                break
        return text + detokenizer.close(), length, reason


def _first_difference(found: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(found, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(found), len(right)))
