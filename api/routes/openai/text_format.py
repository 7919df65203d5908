"""Formats the deltas of a text completion as chunks or as one reply."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from api.routes.openai.deltas import Delta


class TextFormat:
    """The format of `/v1/completions`."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self) -> None:
        self._offsets: Counter[int] = Counter()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for `delta`: at most one."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        return [self._choice(delta)]

    def reply(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        """The choices of the whole reply."""
        outputs: dict[int, Delta] = {}
        texts: dict[int, list[str]] = {}
        for delta in deltas:
            output = outputs.setdefault(delta.index, Delta(delta.index, ""))
            texts.setdefault(delta.index, []).append(delta.text)
            output.logprobs += delta.logprobs
            output.finish_reason = delta.finish_reason or output.finish_reason
        for index, output in outputs.items():
            output.text = "".join(texts[index])
        return [self._choice(outputs[index]) for index in sorted(outputs)]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, index: int, tokens: list[Mapping[str, Any]]) -> dict[str, Any] | None:
        if not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: Mapping[str, Any]) -> dict[str, float]:
    """The sampled token is among them, also if it is not one of the most likely."""
    top = {alternative["token"]: alternative["logprob"] for alternative in token["top"]}
    return {**top, token["token"]: token["logprob"]}
