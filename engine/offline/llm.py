"""A model for a list of prompts: loaded once, asked as often as wanted, without a service.

Law: the engine beneath is the service's own, and gives the same tokens. This file puts parts together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from engine.errors import InvalidParameter
from engine.execution.build import build_execution
from engine.offline.progress import Progress
from engine.offline.runner import OfflineRunner, RequestOutput
from engine.sampling_params import SamplingParams
from engine.validation import shown

Prompt = str | list[int]
Message = Mapping[str, str]
DEFAULT_CACHE = Path("~/.cache/tokenmill")


class LLM:
    """Continuous batching of one model, for one thread at a time.

    `model`: a directory, a hub id, or "SmolLM2-135M-Instruct", which is converted once into `cache_dir`.
    `dtype`: "auto" or a name as torch has it. `device`: "auto", "cpu" or "cuda". `limits`: fields of
    `EngineConfig` by name, such as `max_model_len`, `max_num_seqs` or `num_kv_blocks`, and the others that
    `engine.execution.build.build_execution` takes. One of these is `generation_config`: "auto", the sampling
    defaults of the model's `generation_config.json` are followed, or "none". They hold where no `params` are
    given, and in those of `sampling_params`.

    Raises `InvalidParameter`, or `UnsupportedModel` with the reason.
    """

    def __init__(
        self,
        model: str,
        *,
        cache_dir: Path | str = DEFAULT_CACHE,
        dtype: str = "auto",
        device: str = "auto",
        **limits: Any,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise InvalidParameter("model", f"must be a name or a directory as text, not {shown(model)}")
        execution = build_execution(
            model, cache_dir=_expanded(cache_dir), dtype=dtype, device=device, **limits
        )
        self.config = execution.config
        self._default_sampling = execution.default_sampling
        self._tokenizer = execution.tokenizer
        self._runner = OfflineRunner(execution.new_engine())

    def sampling_params(self, **given: Any) -> SamplingParams:
        """What is given, and the model's own defaults for the rest. Raises `InvalidParameter`."""
        return SamplingParams(**{**self._default_sampling, **given})

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Texts for `prompts`: one text, or a list of texts or of token ids; the results in their order.

        `params`: the same for all, or one for each; None: the model's defaults. The same prompt with the
        same seed gives the same text: for several texts set `n`. `show_progress`: a bar on a terminal's
        stderr.

        A prompt that cannot be served raises `InvalidParameter` with its place in the list, before anything
        runs; one that fails while it runs has an `error` in its result. Ctrl-C ends all of them, and the LLM
        can be asked again. Raises `EngineDead` when the device is gone.
        """
        asked = [prompts] if isinstance(prompts, str) else prompts
        _check_list("prompts", asked)
        encoded = [self._encode(place, one) for place, one in enumerate(asked)]
        return self._run(encoded, params, show_progress)

    def chat(
        self,
        conversations: list[Message] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to a list of them, in the model's own template.

        A message has a `role` and a `content`. For the rest see `generate`.
        """
        asked = [conversations] if _is_conversation(conversations) else conversations
        _check_list("conversations", asked)
        rendered = [self._render(place, one) for place, one in enumerate(asked)]
        return self._run(rendered, params, show_progress)

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        given = (
            params
            if isinstance(params, list)
            else [self.sampling_params() if params is None else params] * len(prompts)
        )
        if len(given) != len(prompts):
            raise InvalidParameter(
                "params", f"must be one, or one for each of the {len(prompts)} prompts, not {len(given)}"
            )
        for one in given:
            if not isinstance(one, SamplingParams):
                raise InvalidParameter("params", f"must be SamplingParams, not {shown(one)}")
        with Progress(len(prompts), is_shown=show_progress) as progress:
            return self._runner.run(prompts, given, progress.note)

    def _encode(self, place: int, prompt: object) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if not isinstance(prompt, str):
            raise InvalidParameter(f"prompt {place}", "must be a text or a list of token ids")
        try:
            return self._tokenizer.encode(prompt)
        except InvalidParameter as error:
            raise InvalidParameter(f"prompt {place}", error.message) from error

    def _render(self, place: int, conversation: object) -> list[int]:
        if not _is_conversation(conversation):
            raise InvalidParameter(f"conversation {place}", "must be a list of messages")
        try:
            return self._tokenizer.render_chat(conversation)
        except InvalidParameter as error:
            raise InvalidParameter(f"conversation {place}", error.message) from error


def _check_list(name: str, value: object) -> None:
    if not isinstance(value, list):
        raise InvalidParameter(name, f"must be a list, not {shown(value)}")


def _is_conversation(value: object) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _expanded(cache_dir: Path | str) -> Path | None:
    """`cache_dir` with its `~` replaced; None where no home directory is known."""
    try:
        return Path(cache_dir).expanduser()
    except RuntimeError:
        return None
