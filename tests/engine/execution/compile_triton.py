"""Compiles the Triton kernels for GPUs that need not be there.

    python -m tests.engine.execution.compile_triton

In a process of its own, without TRITON_INTERPRET.
"""

from typing import Any

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.execution import triton_launch
from engine.execution.triton_kernel import attend_kernel, combine_kernel, split_kernel, store_kernel

SHARED_MEMORY = 99 << 10
"""Bytes that a program may have on the smallest GPUs of the last three generations."""
POINTERS = {"tiles": "*i64", "tables": "*i64", "slots": "*i64", "sums": "*fp32", "stats": "*fp32"}
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def compiled(kernel: Any, named: dict[str, Any], dtype: torch.dtype, arch: int) -> Any:
    """`named`: the constants among the kernel's arguments, and options of the compiler."""
    signature, constants, hints = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in named:
            signature[name], constants[at,] = "constexpr", named[name]
        elif name.endswith("_scale"):
            signature[name] = "fp32"
        elif name.endswith(("_row", "_head", "_rows", "_splits")) or name == "window":
            signature[name] = "i32"
        else:
            signature[name] = POINTERS.get(name, f"*{TYPES[dtype]}")
            hints[at,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in named.items() if name.startswith("num_") and name[4] in "ws"}
    options |= {"enable_fp_fusion": True}
    source = ASTSource(kernel, signature, constants, hints)
    return compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)


def check(size: int, dtype: torch.dtype, arch: int, *, features: bool, single: bool) -> None:
    cut = triton_launch.tiling(4, size, size, dtype, single=single)
    flags = dict.fromkeys(("has_window", "has_softcap", "has_sinks"), features)
    named = {
        **cut._asdict(), **flags, "num_heads": 8, "num_kv_heads": 2, "head_dim": size, "value_dim": size,
        "block_size": 16, "dot_dtype": triton_launch.DTYPES[dtype], "least_split": triton_launch.LEAST_SPLIT,
        "most_splits": triton_launch.MOST_SPLITS, "block_h": 4, "block_r": 16,
    }  # fmt: skip
    for kernel in (store_kernel, attend_kernel, split_kernel, combine_kernel) if single else (attend_kernel,):
        shared = compiled(kernel, named, dtype, arch).metadata.shared
        assert shared <= SHARED_MEMORY, (kernel, cut, shared)


if __name__ == "__main__":
    check(128, torch.bfloat16, 90, features=True, single=True)
    check(256, torch.float16, 90, features=True, single=False)
    check(64, torch.float32, 80, features=False, single=False)
