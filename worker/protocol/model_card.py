"""What a worker tells the API of the model it serves, so that the API can refuse what it can decide."""

import json
from dataclasses import asdict, dataclass


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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "ModelCard":
        return cls(**json.loads(text))
