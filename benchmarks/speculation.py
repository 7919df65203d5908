"""The benefit of speculative decoding for one stream: `python -m benchmarks.speculation [--repeats 5]`.

Each prompt is answered by two engines in turn, without drafts and with them, so that other load affects both.
Summaries and edits of code quote their prompt; stories and plans do not. Says whether both answers have the
same tokens, and writes `benchmarks/results/speculation.json`.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.machine import load_average, machine_facts
from engine.offline.llm import LLM, Message
from engine.offline.runner import RequestOutput

RESULTS = Path(__file__).parent / "results" / "speculation.json"
MODES = {"without drafts": 0, "with drafts": 15}
MAX_TOKENS = 250
FOREST = (
    "The Amazon rainforest covers most of the Amazon basin of South America. This basin encompasses "
    "7,000,000 square kilometres, of which 5,500,000 square kilometres are covered by the rainforest. This "
    "region includes territory belonging to nine nations and 3,344 indigenous territories. The majority of "
    "the forest is contained within Brazil, with 60% of the rainforest, followed by Peru with 13%, Colombia "
    "with 10%, and with minor amounts in Bolivia, Ecuador, French Guiana, Guyana, Suriname, and Venezuela."
)
LEAVES = (
    "Photosynthesis is a system of biological processes by which organisms such as most plants, algae and "
    "cyanobacteria convert light energy, typically from sunlight, into the chemical energy necessary to "
    "fuel their metabolism. These organisms store the converted chemical energy within the bonds of organic "
    "compounds, typically carbohydrates like sugars, starches and cellulose."
)
READER = """def read_config(path):
    with open(path) as file:
        lines = file.readlines()
    config = {}
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, value = line.split("=", 1)
        config[key.strip()] = value.strip()
    return config
"""
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0
"""
PROMPTS = {
    "summary": [
        f"Summarize this text, quoting its sentences:\n\n{FOREST}",
        f"Summarize the following text in three sentences.\n\n{LEAVES}",
        f"What are the key points of this text?\n\n{FOREST}",
        f"Extract the most important sentences from this text:\n\n{LEAVES}",
    ],
    "code edit": [
        f"Add a docstring to this function and print the whole function again:\n\n{READER}",
        f"Rename the class Stack to Pile and print all of the code again:\n\n{STACK}",
        f"Add type hints to this code:\n\n{STACK}",
        f"Print this function again with the variable `config` renamed to `settings`:\n\n{READER}",
    ],
    "no repetition": [
        "Tell me a story about a dragon and a bicycle.",
        "What should I see in Paris? Give reasons.",
        "Write a poem about the sea.",
        "Explain how a computer works to a child.",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    llms = {
        mode: LLM(arguments.model, dtype=arguments.dtype, max_model_len=2048, num_speculative_tokens=number)
        for mode, number in MODES.items()
    }
    results: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.speculation", *sys.argv[1:]]),
        "machine": machine_facts(Path(__file__).parents[1]),
        "load_average": load_average(),
        "threads": torch.get_num_threads(),
        "model": arguments.model,
        "prompts": [
            measure(llms, kind, prompt, arguments.repeats)
            for kind, prompts in PROMPTS.items()
            for prompt in prompts
        ],
    }
    results["median_speedup"] = {
        kind: statistics.median(one["speedup"] for one in results["prompts"] if one["kind"] == kind)
        for kind in PROMPTS
    }
    print(json.dumps(results["median_speedup"]))
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(llms: dict[str, LLM], kind: str, prompt: str, repeats: int) -> dict[str, Any]:
    """Tokens per second of both modes: medians over the repeats, and the spread of the speedup."""
    rates: dict[str, list[float]] = {mode: [] for mode in llms}
    answers: dict[str, RequestOutput] = {}
    for _ in range(repeats):
        for mode, llm in llms.items():
            params = llm.sampling_params(
                temperature=0.8 if kind == "no repetition" else 0.0, seed=3, max_tokens=MAX_TOKENS
            )
            started = time.perf_counter()
            messages: list[Message] = [{"role": "user", "content": prompt}]
            (answers[mode],) = llm.chat(messages, params, show_progress=False)
            rates[mode].append(len(answers[mode].outputs[0].token_ids) / (time.perf_counter() - started))
    plain, drafted = (rates[mode] for mode in MODES)
    speedups = [fast / slow for slow, fast in zip(plain, drafted, strict=True)]
    texts = [answers[mode].outputs[0].token_ids for mode in MODES]
    found = {
        "kind": kind,
        "prompt": prompt[:60],
        "tokens": len(texts[0]),
        "same_tokens": texts[0] == texts[1],
        "tokens_per_second": {mode: round(statistics.median(rate), 1) for mode, rate in rates.items()},
        "speedup": round(statistics.median(speedups), 3),
        "speedup_range": [round(min(speedups), 3), round(max(speedups), 3)],
    }
    print(kind, found["tokens"], found["speedup"], found["speedup_range"], found["same_tokens"])
    return found


if __name__ == "__main__":
    main()
