"""The body of `POST /v1/responses`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.problems import bad_field
from api.schemas.chat_task import ChatTask
from api.schemas.openai.chat import template_kwargs
from api.schemas.openai.response_items import InputItems, to_turns
from api.schemas.openai.shared import CompletionFields, ResponseFormat, Tolerant, to_task
from api.schemas.openai.tools import MAX_TOOLS, ResponseTool, ToolChoiceField, ToolUse
from engine.sampling_params import MAX_LOGPROBS

_INSTRUCTIONS = "instructions"
"""The name of the first message, if it has the instructions: the next response does not inherit it."""
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""The values of `include`. All but one add to items that no response of this service has."""
_UNSUPPORTED: dict[str, Any] = {"conversation": None, "n": 1, "prompt": None, "response_format": None}
"""Fields that are refused, unless they have this value or null."""


def split_instructions(
    messages: Sequence[Mapping[str, Any]] | None,
) -> tuple[str | None, Sequence[Mapping[str, Any]]]:
    """The instructions of a queued response, and its other messages."""
    first, *others = messages or ({},)
    if (first.get("role"), first.get("name")) == ("system", _INSTRUCTIONS):
        return first["content"], others
    return None, messages or ()


class TextFormat(Tolerant):
    """The shape of the text, with the members of a schema at the same level."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    def to_response_format(self) -> ResponseFormat:
        schema = {"schema": self.schema_} if self.type == "json_schema" else None
        return ResponseFormat.model_validate({"type": self.type, "json_schema": schema})


class TextOptions(Tolerant):
    """Options of the text."""

    format: TextFormat | None = None


class ReasoningOptions(Tolerant):
    """Options of models that reason."""

    effort: str | None = Field(None, description="Passed to the chat template as `reasoning_effort`.")


class ResponseBody(CompletionFields):
    """A chat to continue, perhaps in the background. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": "What is the capital of France?", "background": True}}
    )

    input: InputItems = Field(
        description="Text of the user, or items: messages, function calls and their outputs."
    )
    instructions: str | None = Field(None, description="The system message.")
    background: bool | None = Field(
        None, description="Return at once; the task continues without the client."
    )
    store: bool | None = Field(None, description="Every response can be read until its task expires.")
    previous_response_id: str | None = Field(
        None, description="A completed response that this one continues."
    )
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Maximum number of tokens of the output."
    )
    text: TextOptions | None = Field(None, description="The shape of the text.")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: ToolChoiceField = Field(
        None, description="Whether the model calls a tool, and which. Default: `auto`."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further arguments of the chat template, such as `enable_thinking`."
    )
    reasoning: ReasoningOptions | None = Field(None, description="Options of models that reason.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Either way, an input that is too long is refused."
    )
    include: list[str] | None = Field(None, description=f"Further output: `{LOGPROBS}`.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Return log-probabilities with this many of the most likely tokens."
    )

    @property
    def tool_use(self) -> ToolUse:
        tools = [tool.to_definition() for tool in self.tools or ()]
        return ToolUse(tools, self.tool_choice, self.parallel_tool_calls is not False)

    def to_task(self, on_disconnect: str, history: Sequence[dict[str, Any]]) -> ChatTask:
        """The task of this response. `history`: the messages before `input`. Raises `Problem` (400)."""
        self._refuse()
        if self.text and self.text.format:
            self.response_format = self.text.format.to_response_format()
        values = self.task_values()
        if self.max_output_tokens is not None:
            values["max_tokens"] = self.max_output_tokens
        values["logprobs"] = self._num_logprobs()
        effort = self.reasoning.effort if self.reasoning else None
        values["chat_template_kwargs"] = template_kwargs(self.chat_template_kwargs, effort)
        first = {"role": "system", "content": self.instructions, "name": _INSTRUCTIONS}
        messages = [first] if self.instructions is not None else []
        values["messages"] = [*messages, *history, *to_turns(self.input)]
        is_constrained = self.sampling.get("structured_outputs") is not None
        values |= self.tool_use.task_values(is_constrained=is_constrained)
        if self.tools:
            values["tool_use"] = self.tool_use.to_json()
        return to_task(ChatTask, {**values, "on_disconnect": on_disconnect})

    def _num_logprobs(self) -> int | None:
        """How many alternatives are returned with each token; None: no log-probabilities."""
        is_included = LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if is_included or self.top_logprobs else None

    def _refuse(self) -> None:
        self.refuse_unsupported()
        values = {
            **(self.model_extra or {}),
            "n": self.sampling.get("n"),
            "response_format": self.response_format,
        }
        for name, neutral in _UNSUPPORTED.items():
            if values.get(name) is not None and values[name] != neutral:
                raise bad_field(name, "is not supported by this route", "unsupported_field")
        if self.sampling.get("logprobs") is not None:
            raise bad_field(
                "logprobs", "is not supported by this route; use top_logprobs", "unsupported_field"
            )
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise bad_field("include", f"{name[:128]!r} is not known", "unsupported_field")
        if self.background and self.store is False:
            raise bad_field("store", "must not be false with background: true")
