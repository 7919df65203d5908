"""Checks of a request that need more than its body: the service's settings and the model card.

What is refused here would fail in the worker too. The worker checks the rest. Before the first worker of a
model has published a card, nothing that depends on the model is checked.
"""

from collections.abc import Iterable

from api.problems import Problem, bad_field, excerpt
from api.schemas.requests import TaskBody
from api.schemas.webhook_url import is_public, parse_url
from engine.errors import InvalidParameter
from tokenmill.protocol.limits import prompt_logprobs_error, prompt_logprobs_fit
from tokenmill.protocol.records import ModelCard
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings


def check_request(body: TaskBody, settings: ApiSettings, store: TaskStore) -> ModelCard | None:
    """Return the card of the model, None before a worker has published one. Raises `Problem` (400 or 404)."""
    _check_sampling(body)
    _check_model(body, settings.public_model)
    _check_webhook(body, settings)
    card = store.model_card(settings.slug)
    if card is not None:
        _check_limits(body, card)
    return card


def _check_sampling(body: TaskBody) -> None:
    """Build the parameters as the worker will. The schema has the same rules, so no known body fails here."""
    try:
        _ = body.sampling_params
    except InvalidParameter as error:
        raise bad_field(error.field, error.message) from None


def _check_model(body: TaskBody, served: str) -> None:
    if body.model is not None and body.model != served:
        detail = f"model: this service serves {served!r}, not {excerpt(body.model)!r}"
        raise Problem(404, "model_not_found", detail, param="model")


def _check_webhook(body: TaskBody, settings: ApiSettings) -> None:
    """A host name is checked when the webhook is delivered, as its addresses may change."""
    if body.webhook is None:
        return
    if not settings.webhook_keys:
        detail = "webhooks are disabled: the operator of this service has not set TOKENMILL_WEBHOOK_SECRET"
        raise bad_field("webhook", detail, "webhooks_disabled")
    host = parse_url(body.webhook.url).host
    if not settings.webhook_allow_private and not is_public(host):
        raise bad_field("webhook.url", f"{excerpt(host)} is not a public address", "webhook_address")


def _check_limits(body: TaskBody, card: ModelCard) -> None:
    """Check the prompt and all token ids against the limits of the model."""
    if body.messages is not None and not card.has_chat_template:
        raise bad_field(
            "messages", f"{card.model} has no chat template; use `prompt` instead", "no_chat_template"
        )
    if body.prompt is not None:
        _check_prompt_bytes(body.prompt, card)
    if body.prompt_token_ids is not None:
        _check_prompt_token_ids(body.prompt_token_ids, body.sampling_params.prompt_logprobs, card)
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_token_ids(field, getattr(body.sampling_params, field) or (), card)


def _check_prompt_bytes(prompt: str, card: ModelCard) -> None:
    """The length of a chat is known only after its template: the worker checks it."""
    if card.max_prompt_bytes is not None and (size := len(prompt.encode())) > card.max_prompt_bytes:
        detail = (
            f"the prompt has {size} bytes; at most {card.max_prompt_bytes} bytes can fit the limit of "
            f"{card.max_prompt_tokens} tokens"
        )
        raise bad_field("prompt", detail, "context_length_exceeded")


def _check_prompt_token_ids(token_ids: list[int], num_logprobs: int | None, card: ModelCard) -> None:
    _check_token_ids("prompt_token_ids", token_ids, card)
    if len(token_ids) > card.max_prompt_tokens:
        detail = f"the prompt has {len(token_ids)} tokens; the limit is {card.max_prompt_tokens}"
        raise bad_field("prompt_token_ids", detail, "context_length_exceeded")
    if not prompt_logprobs_fit(len(token_ids), num_logprobs):
        raise bad_field("prompt_logprobs", prompt_logprobs_error(len(token_ids)))


def _check_token_ids(field: str, token_ids: Iterable[int], card: ModelCard) -> None:
    largest = max(token_ids, default=0)
    if largest >= card.vocab_size:
        # Python refuses to print an integer of thousands of digits.
        shown = str(largest) if largest.bit_length() <= 64 else "a number of more than 64 bits"
        raise bad_field(field, f"{shown} is not in the vocabulary of {card.vocab_size} tokens")
