"""Bodies that are no JSON: the generator does not see them, as their routes parse them themselves."""

from typing import Any

_UPLOAD = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch", "description": "What the file is for."},
        "file": {
            "type": "string",
            "contentMediaType": "application/octet-stream",
            "description": "JSON lines: `custom_id`, `method`, `url` and `body` of each request.",
        },
        "expires_after[anchor]": {"const": "created_at", "description": "Needs `expires_after[seconds]`."},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": 3600,
            "maximum": 2592000,
            "description": "When the file is deleted, after its upload.",
        },
    },
}
_LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",'
    ' "body": {"messages": [{"role": "user", "content": "Hello"}]}}\n'
)

BODIES: dict[tuple[str, str], Any] = {
    ("post", "/v1/files"): {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": _UPLOAD, "example": {"purpose": "batch", "file": _LINE}}
        },
    }
}
"""Method and path -> `requestBody`."""
