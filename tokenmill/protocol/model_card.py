"""What a worker tells the API of the model it serves, so that the API can refuse what it can decide."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Limits and facts of one served model. Lengths in tokens."""

    model: str
    vocab_size: int
    max_model_len: int
    #: The longest prompt that this deployment accepts: below `max_model_len`, and smaller pools or budgets.
    max_prompt_tokens: int
    has_chat_template: bool
    fingerprint: str
    #: The longest `prompt`, in bytes of UTF-8, that can be so few tokens. None: the tokenizer sets no bound.
    max_prompt_bytes: int | None = None
    #: Sampling fields that hold where a request does not give them, from the model's
    #: `generation_config.json`.
    default_sampling: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "ModelCard":
        """Of a newer version too: members that this one does not know are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})
