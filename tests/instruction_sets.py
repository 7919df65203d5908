"""Runs the numerical tests as other processors would: `python -m tests.instruction_sets [PYTEST OPTION ...]`.

torch, oneDNN, MKL and the native operators choose their kernels by the processor. Each level limits all four
to one instruction set. A level that this processor does not have is named and left out.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXECUTION = "tests/engine/execution"
NUMERICAL_TESTS = (
    "attention/test_native_backend.py", "attention/test_native_inputs.py", "attention/test_torch_backend.py",
    "deterministic", "graphs/test_cpu_capture.py", "layers", "sampling/test_filter_sums.py",
    "sampling/test_gumbel.py", "sampling/test_logprobs.py", "sampling/test_native_draw.py",
    "sampling/test_sampler.py", "test_greedy_equality.py", "test_mixed_batches.py",
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """An instruction set: its processor flags, and the settings that limit libraries to it."""

    name: str
    flags: frozenset[str]
    settings: dict[str, str]


LEVELS = (
    Level(
        "AVX2",
        frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"}),
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "CXXFLAGS": "-march=x86-64-v3",
        },
    ),
    Level(
        "AVX-512 without bfloat16 instructions",
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
        {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "CXXFLAGS": "-march=x86-64-v4",
        },
    ),
)
SETTINGS = tuple(LEVELS[0].settings)


def processor() -> tuple[str, frozenset[str]]:
    """The processor's name and its flags, as far as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown", frozenset()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return facts.get("model name", "unknown"), frozenset(facts.get("flags", "").split())


def report() -> str:
    """One line: the processor, its widest vectors, and the limits in force."""
    name, flags = processor()
    widest = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    bfloat16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    limits = [f"{setting}={os.environ[setting]}" for setting in SETTINGS if setting in os.environ]
    return f"processor: {', '.join([name, widest, *bfloat16])}; limits: {', '.join(limits) or 'none'}"


def main() -> int:
    _, flags = processor()
    failed = []
    for level in LEVELS:
        if not level.flags <= flags:
            print(  # noqa: T201  # the program's output
                f"{level.name}: not an instruction set of this processor", flush=True
            )
            continue
        print(f"{level.name}:", flush=True)  # noqa: T201  # the program's output
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *sys.argv[1:],
                *(f"{EXECUTION}/{name}" for name in NUMERICAL_TESTS),
            ],
            env={**os.environ, **level.settings},
            cwd=ROOT,
            check=False,
        )
        if done.returncode != 0:
            failed.append(level.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)  # noqa: T201  # the program's output
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
