"""The replies of the OpenAI-compatible routes, as OpenAPI shows them."""

from typing import Literal

from pydantic import BaseModel, Field


class CachedTokens(BaseModel):
    """Prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int


class CompletionUsage(BaseModel):
    """Tokens of the whole call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class AlternativeToken(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(AlternativeToken):
    """An output token."""

    top_logprobs: list[AlternativeToken] = Field(description="The most likely tokens, in order.")


class ChatLogprobs(BaseModel):
    """One item for each output token."""

    content: list[ChatToken]
    refusal: None


class FunctionCallView(BaseModel):
    """The function that the model calls. `arguments` is JSON text, not checked against the schema."""

    name: str
    arguments: str


class ToolCallView(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCallView


class AssistantMessage(BaseModel):
    """The answer: text, tool calls, or both."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallView] | None = None


class ChatChoice(BaseModel):
    """One output."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """The answer to a chat. With `stream: true` the reply is a stream of `chat.completion.chunk` objects."""

    id: str = Field(description="`chatcmpl-` and the id of the task.")
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextLogprobs(BaseModel):
    """Lists with one item for each output token; with `echo`, for those of the prompt before them. The first
    token of a prompt has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One output."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """Continuations of texts. With `stream: true` the reply is a stream of such objects."""

    id: str = Field(description="`cmpl-` and the id of the first task.")
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage


class ModelView(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When this API process started, in seconds since the epoch.")
    owned_by: str = "tokenmill"
    max_model_len: int | None = Field(
        None, description="Context length in tokens. Null until a worker has loaded the model."
    )


class ModelList(BaseModel):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[ModelView]
