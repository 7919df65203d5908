"""Compiles the Triton kernels without a GPU and records what the compiler reports.

    python -m tests.engine.execution.attention.compile_triton            # compile a few kernels and compare
    python -m tests.engine.execution.attention.compile_triton --all      # compile all kernels, in minutes
    python -m tests.engine.execution.attention.compile_triton --write    # compile changed kernels, write them

Needs its own process, without TRITON_INTERPRET. The table `compiled_kernels.tsv` has registers and stack of a
thread, bytes of spilled registers, shared memory of a program, and the matrix instructions.
"""

import ast
import csv
import hashlib
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import compile as compile_kernel
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.execution.attention import triton_kernel, triton_launch

TABLE = Path(__file__).with_name("compiled_kernels.tsv")
ARCHITECTURES = (80, 86, 89, 90, 100)
"""A100; A10 and RTX 30; L4 and RTX 40; H100; B200."""
POINTERS = {"tiles": "*i64", "tables": "*i64", "slot_mapping": "*i64", "sums": "*fp32", "stats": "*fp32"}
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
PRODUCTS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
FEATURES = ("has_window", "has_softcap", "has_sinks")
KEY = ("arch", "model", "kernel")


class Shape(NamedTuple):
    """Attention of one kind of model."""

    head_dim: int
    group: int
    dtype: torch.dtype = torch.bfloat16
    value_dim: int | None = None
    features: bool = False
    block_size: int = 16


SHAPES = {
    "8B": Shape(128, 4),
    "0.5B": Shape(64, 7),
    "gemma": Shape(256, 2, features=True),
    "latent": Shape(192, 1, value_dim=128),
    "float16": Shape(128, 8, torch.float16),
    "self-check": Shape(128, 4, torch.float32, block_size=4),
    "self-check, gemma": Shape(256, 2, torch.float32, features=True, block_size=4),
}
KERNELS = {
    "8B": ("store", "decode", "chunk", "split", "combine"),
    "0.5B": ("chunk", "split"),
    "gemma": ("chunk", "split", "combine"),
    "latent": ("chunk",),
    "float16": ("chunk",),
    "self-check": ("decode", "chunk"),
    "self-check, gemma": ("chunk",),
}
"""`decode` and `chunk` are both `attend_kernel`: over one query, and over many."""
QUICK = (
    (90, "8B", "store"),
    (90, "8B", "chunk"),
    (89, "gemma", "chunk"),
    (86, "0.5B", "split"),
    (80, "gemma", "combine"),
    (100, "self-check", "decode"),
)
"""Each kernel, architecture and dtype once."""


def cases() -> list[tuple[int, str, str]]:
    return [(arch, model, kernel) for arch in ARCHITECTURES for model in SHAPES for kernel in KERNELS[model]]


def arguments(model: str, kernel: str) -> tuple[Any, dict[str, Any]]:
    """The kernel and the constants and options of its launch."""
    shape = SHAPES[model]
    value_dim = shape.value_dim or shape.head_dim
    decode = kernel != "chunk"
    cut = triton_launch.tiling(shape.group, shape.head_dim, value_dim, shape.dtype, decode=decode)
    named = {
        **cut._asdict(),
        **dict.fromkeys(FEATURES, shape.features),
        "num_heads": 2 * shape.group,
        "num_kv_heads": 2,
        "head_dim": shape.head_dim,
        "value_dim": value_dim,
        "block_size": shape.block_size,
        "dot_dtype": triton_launch.DTYPES[shape.dtype],
        "min_split": triton_launch.MIN_SPLIT,
        "max_splits": triton_launch.MAX_SPLITS,
        "block_h": triton_launch.COMBINED_HEADS,
        "block_r": triton_launch.STORED_ROWS,
    }
    if kernel in ("store", "combine"):
        # Launched with Triton's defaults.
        named |= {"num_warps": 4, "num_stages": 3}
    if kernel == "store":
        named["block_d"] = triton.next_power_of_2(shape.head_dim)
        named["block_v"] = triton.next_power_of_2(value_dim)
    name = "attend" if kernel in ("decode", "chunk") else kernel
    return getattr(triton_kernel, f"{name}_kernel"), named


def compiled(arch: int, model: str, kernel: str) -> Any:
    function, named = arguments(model, kernel)
    signature, constants, hints = {}, {}, {}
    for at, name in enumerate(function.arg_names):
        if name in named:
            signature[name], constants[at,] = "constexpr", named[name]
        elif name.endswith("_scale"):
            signature[name] = "fp32"
        elif name.endswith(("_row", "_head", "_rows", "_splits")) or name == "window":
            signature[name] = "i32"
            if name.endswith(("_row", "_head")):
                hints[at,] = [["tt.divisibility", 16]]
        else:
            signature[name] = POINTERS.get(name, f"*{TYPES[SHAPES[model].dtype]}")
            hints[at,] = [["tt.divisibility", 16]]
    options = {name: named[name] for name in ("num_warps", "num_stages")} | {"enable_fp_fusion": True}
    source = ASTSource(function, signature, constants, hints)
    return compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)


def measured(case: tuple[int, str, str]) -> dict[str, str]:
    """Compile one case; a row of the table."""
    # Only an actual compilation reports resources.
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(StringIO()) as log:
        made = compiled(*case)
    registers, stack, spilled = _usage(log.getvalue())
    _, named = arguments(*case[1:])
    counts = [(one, len(re.findall(re.escape(one), made.asm["ptx"]))) for one in PRODUCTS]
    row = {
        "tile": "x".join(str(named[name]) for name in ("block_m", "block_n")),
        "warps": named["num_warps"],
        "stages": named["num_stages"],
        "registers": registers,
        "stack": stack,
        "spilled": spilled,
        "shared": made.metadata.shared,
        "products": " ".join(f"{one}*{count}" for one, count in counts if count) or "-",
        "inputs": inputs_of(*case[1:]),
    }
    return {name: str(value) for name, value in (dict(zip(KEY, case, strict=True)) | row).items()}


def _usage(log: str) -> tuple[int, int, int]:
    """Registers, bytes of stack and bytes of spilled registers of a thread, from the log of ptxas."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert used, log
    assert frame, log
    return int(used[1]), int(frame[1]), int(frame[2]) + int(frame[3])


def inputs_of(model: str, kernel: str) -> str:
    """A digest of everything that a row depends on: kernel code, constants and Triton's version."""
    _, named = arguments(model, kernel)
    text = f"{_code()} {sorted(named.items(), key=str)} {triton.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _code() -> str:
    """The kernels without comments and docstrings."""
    tree = ast.parse(Path(triton_kernel.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def read_table() -> dict[tuple[int, str, str], dict[str, str]]:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {(int(row["arch"]), row["model"], row["kernel"]): row for row in rows}


def write_table(rows: list[dict[str, str]]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def stale() -> list[tuple[int, str, str]]:
    """The cases that the table lacks or whose digest has changed."""
    kept = read_table() if TABLE.exists() else {}
    return [
        case for case in cases() if case not in kept or kept[case]["inputs"] != inputs_of(case[1], case[2])
    ]


def main(asked: list[str]) -> None:
    wanted = stale() if "--write" in asked else cases() if "--all" in asked else list(QUICK)
    with ProcessPoolExecutor(2 if asked else 1) as pool:
        rows = dict(zip(wanted, pool.map(measured, wanted), strict=True))
    if "--write" in asked:
        kept = (read_table() if TABLE.exists() else {}) | rows
        write_table([kept[case] for case in cases()])
    kept = read_table()
    for case, row in rows.items():
        if kept.get(case) != row:
            sys.exit(f"the table has {kept.get(case)}, but compiled was {row}; see --write")


if __name__ == "__main__":
    main(sys.argv[1:])
