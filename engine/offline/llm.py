"""`LLM`: a model for lists of prompts, without a service. It uses the same engine as the service."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from engine.errors import InvalidParameter
from engine.execution.build import build_execution
from engine.offline.progress import Progress
from engine.offline.runner import OfflineRunner, RequestOutput
from engine.sampling_params import SamplingParams
from engine.validation import excerpt

Prompt = str | list[int]
Message = Mapping[str, str]
DEFAULT_CACHE = Path("~/.cache/tokenmill")


class LLM:
    """Continuous batching of one model. One thread uses it at a time.

    `model`: a directory, a hub id, or "SmolLM2-135M-Instruct", which is converted once into `cache_dir`.
    `dtype`: "auto" or a torch dtype's name. `device`: "auto", "cpu" or "cuda". `options`: fields of
    `EngineConfig`, such as `max_model_len`, `max_num_seqs` or `num_kv_blocks`, and parameters of
    `engine.execution.build.build_execution`. With `generation_config="auto"`, the default, calls without
    `params` and `LLM.sampling_params` use the model's `generation_config.json`; "none" ignores the file.

    Raises `InvalidParameter` or `UnsupportedModel`.
    """

    def __init__(
        self,
        model: str,
        *,
        cache_dir: Path | str = DEFAULT_CACHE,
        dtype: str = "auto",
        device: str = "auto",
        **options: Any,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise InvalidParameter("model", f"must be a string (a name or a directory), not {excerpt(model)}")
        execution = build_execution(
            model, cache_dir=_expanded(cache_dir), dtype=dtype, device=device, **options
        )
        self.config = execution.config
        self._default_sampling = execution.default_sampling
        self._tokenizer = execution.tokenizer
        self._runner = OfflineRunner(execution.new_engine())

    def sampling_params(self, **fields: Any) -> SamplingParams:
        """Sampling parameters with the model's defaults for omitted fields. Raises `InvalidParameter`."""
        return SamplingParams(**{**self._default_sampling, **fields})

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate texts for prompts: one text, or a list of texts or of token ids. Results keep their order.

        `params`: for all prompts, or a list with one for each; None: the model's defaults. The same prompt
        with the same seed produces the same text; set `n` for several texts. `show_progress`: show a progress
        bar on stderr.

        Raises `InvalidParameter` for a prompt that cannot be served, with its position in the list and before
        anything runs, and `EngineDead` if the device fails. A prompt that fails while it runs has an `error`
        in its result. Ctrl-C ends the call; the LLM can be used again.
        """
        all_prompts = [prompts] if isinstance(prompts, str) else prompts
        _check_list("prompts", all_prompts)
        encoded = [self._encode(position, prompt) for position, prompt in enumerate(all_prompts)]
        return self._run(encoded, params, show_progress)

    def chat(
        self,
        conversations: list[Message] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate answers to one conversation or a list of conversations, with the model's chat template.

        A message has a `role` and a `content`. See `generate` for the rest.
        """
        all_conversations = [conversations] if _is_conversation(conversations) else conversations
        _check_list("conversations", all_conversations)
        rendered = [
            self._render(position, conversation) for position, conversation in enumerate(all_conversations)
        ]
        return self._run(rendered, params, show_progress)

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        if not isinstance(params, list):
            params = [self.sampling_params() if params is None else params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidParameter(
                "params", f"must be one, or one for each of the {len(prompts)} prompts, not {len(params)}"
            )
        for prompt_params in params:
            if not isinstance(prompt_params, SamplingParams):
                raise InvalidParameter("params", f"must be SamplingParams, not {excerpt(prompt_params)}")
        with Progress(len(prompts), is_shown=show_progress) as progress:
            return self._runner.run(prompts, params, progress.update)

    def _encode(self, position: int, prompt: object) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if not isinstance(prompt, str):
            raise InvalidParameter(f"prompt {position}", "must be a string or a list of token ids")
        try:
            return self._tokenizer.encode(prompt)
        except InvalidParameter as error:
            raise InvalidParameter(f"prompt {position}", error.message) from error

    def _render(self, position: int, conversation: object) -> list[int]:
        if not _is_conversation(conversation):
            raise InvalidParameter(f"conversation {position}", "must be a list of messages")
        try:
            return self._tokenizer.render_chat(conversation)
        except InvalidParameter as error:
            raise InvalidParameter(f"conversation {position}", error.message) from error


def _check_list(name: str, value: object) -> None:
    if not isinstance(value, list):
        raise InvalidParameter(name, f"must be a list, not {excerpt(value)}")


def _is_conversation(value: object) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _expanded(cache_dir: Path | str) -> Path | None:
    """`cache_dir` with `~` expanded; None if the home directory is unknown."""
    try:
        return Path(cache_dir).expanduser()
    except RuntimeError:
        return None
