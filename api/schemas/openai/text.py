"""The body of `POST /v1/completions`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from api.problems import bad_field
from api.schemas.openai.shared import CompletionFields, to_task
from api.schemas.requests import TaskBody

MAX_PROMPTS = 128


def _to_prompts(value: object) -> object:
    """A list of prompts, each text or token ids."""
    if isinstance(value, str) or _are_token_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, token ids, or a list of texts or of token ids")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    if not all((isinstance(prompt, str) and prompt) or _are_token_ids(prompt) for prompt in value):
        raise ValueError("each prompt must be text or token ids, and not empty")
    return value


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    ]
}


class CompletionBody(CompletionFields):
    """A text to continue, or several. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "max_tokens": 32}
        }
    )

    prompt: Annotated[list[str | list[int]], BeforeValidator(_to_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = (
        Field(description=f"Text or token ids. Several prompts, at most {MAX_PROMPTS}, are several tasks.")
    )

    echo: bool | None = Field(None, description="Begin the text, and its `logprobs`, with the prompt.")

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are returned with each token; None: no log-probabilities."""
        return self.sampling.get("logprobs")

    def to_tasks(self, on_disconnect: str) -> list[TaskBody]:
        """One task for each prompt. Raises `Problem` (400)."""
        self.refuse_unsupported()
        if self.echo and self.num_logprobs is not None and self.sampling.get("n", 1) > 1:
            raise bad_field("echo", "requires n = 1 with logprobs")
        values = {**self.task_values(), "on_disconnect": on_disconnect}
        return [
            to_task(TaskBody, {**values, **_prompt_field(prompt), **self._echo_field(prompt)})
            for prompt in self.prompt
        ]

    def _echo_field(self, prompt: str | list[int]) -> dict[str, Any]:
        """Log-probabilities of the prompt also have the text of its tokens."""
        num_logprobs = 0 if self.num_logprobs is None and isinstance(prompt, list) else self.num_logprobs
        return {"prompt_logprobs": num_logprobs} if self.echo else {}


def _prompt_field(prompt: str | list[int]) -> dict[str, Any]:
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
