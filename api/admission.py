"""What can be decided before a task is queued: the model's name, and what the model card allows.

Law: everything refused here would fail in the worker too, and what only the worker can see is let through.
Without a card, as before the first worker of a model, nothing is known and all is let through.
"""

from collections.abc import Iterable

from api.problems import Problem, bad_field, shown
from api.schemas.requests import TaskBody
from api.schemas.webhook_url import is_public, parse_url
from api.settings import ApiSettings
from tokenmill.protocol.limits import prompt_logprobs_error, prompt_logprobs_fit
from tokenmill.protocol.records import ModelCard


def check_model(body: TaskBody, served: str) -> None:
    """Raises `Problem` (404) for another model than the served one."""
    if body.model is not None and body.model != served:
        detail = f"model: this service has {served!r}, not {shown(body.model)!r}"
        raise Problem(404, "model_not_found", detail, param="model")


def check_webhook(body: TaskBody, settings: ApiSettings) -> None:
    """Raises `Problem` (400) where this service signs none, or would never deliver to that address.

    What a name stands for is looked up at the delivery, and judged then.
    """
    if body.webhook is None:
        return
    if not settings.webhook_keys:
        detail = "this service signs no webhooks: its operator has not set TOKENMILL_WEBHOOK_SECRET"
        raise bad_field("webhook", detail, "webhooks_disabled")
    host = parse_url(body.webhook.url).host
    if not settings.webhook_allow_private and not is_public(host):
        raise bad_field("webhook.url", f"{shown(host)} is not a public address", "webhook_address")


def check_card(body: TaskBody, card: ModelCard) -> None:
    """Raises `Problem` (400) that names the field and the limit."""
    if body.messages is not None and not card.has_chat_template:
        raise bad_field("messages", f"{card.model} has no chat template; send `prompt`", "no_chat_template")
    if body.prompt is not None:
        _check_bytes(body.prompt, card)
    if body.prompt_token_ids is not None:
        _check_ids("prompt_token_ids", body.prompt_token_ids, card)
        if len(body.prompt_token_ids) > card.max_prompt_tokens:
            detail = f"{len(body.prompt_token_ids)} tokens; a prompt has at most {card.max_prompt_tokens}"
            raise bad_field("prompt_token_ids", detail, "context_length_exceeded")
        if not prompt_logprobs_fit(len(body.prompt_token_ids), body.prompt_logprobs):
            raise bad_field("prompt_logprobs", prompt_logprobs_error(len(body.prompt_token_ids)))
    _check_ids("stop_token_ids", body.stop_token_ids or (), card)
    _check_ids("allowed_token_ids", body.allowed_token_ids or (), card)
    _check_ids("logit_bias", map(int, body.logit_bias or ()), card)


def _check_bytes(prompt: str, card: ModelCard) -> None:
    """How long a chat becomes only its template tells: the worker checks that."""
    if card.max_prompt_bytes is not None and (size := len(prompt.encode())) > card.max_prompt_bytes:
        detail = (
            f"{size} bytes; a prompt has at most {card.max_prompt_tokens} tokens, which are at most "
            f"{card.max_prompt_bytes} bytes of text"
        )
        raise bad_field("prompt", detail, "context_length_exceeded")


def _check_ids(field: str, token_ids: Iterable[int], card: ModelCard) -> None:
    largest = max(token_ids, default=0)
    if largest >= card.vocab_size:
        raise bad_field(field, f"{_digits(largest)} is not in the vocabulary of {card.vocab_size} tokens")


def _digits(number: int) -> str:
    """A number of any size for a message; Python itself refuses to print very long ones."""
    return str(number) if number.bit_length() <= 64 else "a number of more than 64 bits"
