"""Paths as clients of OpenAI's API write them.

A client joins its base URL and a path of its own. Both, or none, may have `/v1`, and some end in a slash.
Azure's clients put `/openai` and perhaps the name of the model before it.
"""

import re

PREFIX = "/v1/"
_RESOURCES = frozenset({"batches", "chat", "completions", "files", "models", "responses"})
"""First segments below `/v1`. No other path of the service begins with one of them."""
_AZURE = re.compile(r"^/openai/(?:deployments/[^/]+/)?")


def served_path(path: str) -> str:
    """The path of the route that `path` means: `/chat/completions` is `/v1/chat/completions`."""
    path = _AZURE.sub("/", path)
    if path.removeprefix("/").partition("/")[0] in _RESOURCES:
        path = PREFIX + path[1:]
    while path.startswith(PREFIX + PREFIX[1:]):
        path = path[len(PREFIX) - 1 :]
    return path.rstrip("/") if path.startswith(PREFIX) else path
