"""Schemas of what is not the reply to a call: server-sent events and webhooks."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from api.schemas.openai.replies import CompletionUsage
from api.schemas.replies import ErrorView, PromptLogprobsView, Task, TokenLogprobsView, UsageView
from api.schemas.steps import StepEventView

FinishReasonName = Literal["stop", "length", "cancelled", "timeout", "error"]


class _TaskEvent(BaseModel):
    v: Literal[1] = Field(description="Version of the events.")
    id: str = Field(description="The `id` of the task.")
    seq: int = Field(description="Number of the event, from 0. The `id` of the server-sent event.")
    index: int = Field(description="Which of the `n` outputs it belongs to.")


class TokenEventView(_TaskEvent):
    """One token of one output. Event `token`."""

    token: int = Field(description="Token id.")
    text: str = Field(description="Empty while an incomplete character is held back.")
    logprobs: TokenLogprobsView | None = Field(None, description="If requested.")
    prompt_logprobs: list[PromptLogprobsView | None] | None = Field(
        None, description="If requested, once, with the first token."
    )


class EndEventView(_TaskEvent):
    """The end of one output, while others continue. Event `end`."""

    token: None
    text: str = Field(description="The rest that was held back.")
    finish_reason: FinishReasonName
    error: ErrorView | None = None


class FinishedEventView(EndEventView):
    """The end of the last output and of the task. Event `finished`, the last one."""

    done: Literal[True]
    usage: UsageView | None
    error: ErrorView | None


class TaskEnded(BaseModel):
    """The body of a webhook. A receiver may get it twice, with the same `webhook-id`."""

    type: Literal["task.completed", "task.failed", "task.cancelled"]
    timestamp: str = Field(description="When the task ended, RFC 3339.")
    data: Task = Field(description="The task, as a poll returns it.")


class _Chunk(BaseModel):
    id: str
    created: int
    model: str
    choices: list[dict[str, Any]] = Field(description="Empty in the chunk with the usage.")
    usage: CompletionUsage | None = Field(None, description="With `stream_options.include_usage`.")


class ChatCompletionChunk(_Chunk):
    """A part of a chat completion: `choices[].delta` is added to the message."""

    object: Literal["chat.completion.chunk"]


class CompletionChunk(_Chunk):
    """A part of a completion: `choices[].text` is added to the text."""

    object: Literal["text_completion"]


class StreamError(BaseModel):
    """An error after the start of a stream of chunks. No further chunk follows."""

    error: ErrorView


class ResponseEventView(BaseModel):
    """An event of a response: its name is `type`, and further members are those of OpenAI's API."""

    type: str
    sequence_number: int = Field(description="Number of the event. `starting_after` continues after it.")


EVENT_MODELS = (
    TokenEventView,
    EndEventView,
    FinishedEventView,
    StepEventView,
    ChatCompletionChunk,
    CompletionChunk,
    StreamError,
    ResponseEventView,
)
_RESPONSES = {"": "ResponseEventView"}
STREAMS: dict[tuple[str, str], dict[str, str]] = {
    ("get", "/v1/tasks/{task_id}/events"): {
        "token": "TokenEventView",
        "end": "EndEventView",
        "finished": "FinishedEventView",
    },
    ("get", "/v1/workers/{name}/steps"): {"step": "StepEventView"},
    ("post", "/v1/chat/completions"): {"": "ChatCompletionChunk"},
    ("post", "/v1/completions"): {"": "CompletionChunk"},
    ("post", "/v1/responses"): _RESPONSES,
    ("get", "/v1/responses/{response_id}"): _RESPONSES,
}
"""Method and path of a stream -> name of an event, "" for any -> schema of its data."""

_SIGNED = {
    "webhook-id": "`msg_` and the id of the task, the same at each attempt.",
    "webhook-timestamp": "Seconds since the epoch, when this attempt was signed.",
    "webhook-signature": "`v1,` and the base64 HMAC-SHA256 of `id.timestamp.body`, one for each secret.",
    "X-Request-ID": "`X-Request-ID` of the call that submitted the task.",
}


def webhooks(example: Any) -> dict[str, Any]:
    """The member `webhooks` of the document."""
    content = {"schema": {"$ref": "#/components/schemas/TaskEnded"}, "example": example}
    return {
        "taskEnded": {
            "post": {
                "operationId": "task_ended",
                "tags": ["Tasks"],
                "summary": "A task has ended",
                "description": "Sent to the `webhook.url` of a task, signed as Standard Webhooks "
                "describes. An attempt that is not answered with a 2xx is repeated, eight times within "
                "about a day.",
                "parameters": [
                    {
                        "name": name,
                        "in": "header",
                        "required": name != "X-Request-ID",
                        "description": text,
                        "schema": {"type": "string"},
                    }
                    for name, text in _SIGNED.items()
                ],
                "requestBody": {"required": True, "content": {"application/json": content}},
                "responses": {
                    "2XX": {"description": "The webhook is delivered."},
                    "410": {"description": "The receiver wants no further attempt."},
                    "default": {"description": "The attempt failed and is repeated."},
                },
            }
        }
    }
