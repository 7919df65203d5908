"""Formats the deltas of a text completion as chunks or as one reply."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from api.routes.openai.deltas import Delta

Prompt = str | list[int]


class TextFormat:
    """The format of `/v1/completions`. `echoed`: the prompts that their texts begin with, by index."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, echoed: Mapping[int, Prompt] | None = None, *, has_logprobs: bool = True) -> None:
        self._echoed = dict(echoed or {})
        self._has_logprobs = has_logprobs
        self._offsets: Counter[int] = Counter()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for `delta`: at most one."""
        if not (delta.text or delta.logprobs or delta.prompt_logprobs or delta.finish_reason):
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
            output.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
            output.finish_reason = delta.finish_reason or output.finish_reason
        for index, output in outputs.items():
            output.text = "".join(texts[index])
        return [self._choice(outputs[index]) for index in sorted(outputs)]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        prompt = self._echoed.pop(delta.index, None)
        text, tokens = "", delta.logprobs
        if prompt is not None:
            text, prompt_tokens = _echo(prompt, delta.prompt_logprobs)
            tokens = prompt_tokens + tokens
        return {
            "index": delta.index,
            "text": text + delta.text,
            "logprobs": self._logprobs(delta.index, tokens) if self._has_logprobs else None,
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


def _top(token: Mapping[str, Any]) -> dict[str, float] | None:
    """The sampled token is among them, also if it is not one of the most likely."""
    if token["logprob"] is None:
        return None
    top = {alternative["token"]: alternative["logprob"] for alternative in token["top"]}
    return {**top, token["token"]: token["logprob"]}


def _echo(
    prompt: Prompt, logprobs: Sequence[Mapping[str, Any] | None]
) -> tuple[str, list[Mapping[str, Any]]]:
    """The text of a prompt and its tokens, which are those of `logprobs`.

    The first one has no log-probability, and its text is what the others leave of the prompt: none if it is
    a special token, or if the prompt is token ids.
    """
    others = [token for token in logprobs if token is not None]
    rest = b"".join(bytes(token["bytes"]) for token in others)
    whole = prompt.encode() if isinstance(prompt, str) else rest
    first = whole[: len(whole) - len(rest)] if whole.endswith(rest) else b""
    token: dict[str, Any] = {"token": first.decode("utf-8", "replace"), "logprob": None, "top": []}
    return whole.decode("utf-8", "replace"), [token, *others] if logprobs else []
