"""Self-check of the reductions in a forward pass, on operands that make the order of additions visible.

A product in bfloat16 is accumulated in float32 and rounded to 8 bits at the end, so kernels with different
orders of additions agree in almost every element of real activations. oneDNN uses other kernels for one or
two rows on AVX-512 processors, where one logit in thousands differs, which a comparison of logits may miss.
The operands here sum to zero in exact arithmetic, so an operator returns its rounding error, which depends on
the order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

LEFT_OPERAND = {
    aten.linear.default: 0,
    aten.mm.default: 0,
    aten.matmul.default: 0,
    aten.addmm.default: 1,
    aten.bmm.default: 0,
}
"""Products of rows [..., rows, depth] and a matrix: the index of the rows, which the matrix follows."""
ROW_REDUCTIONS = (
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.softmax.int,
    aten._softmax.default,
    aten.layer_norm.default,
    aten.native_layer_norm.default,
    aten.rms_norm.default,
)
"""Operators that reduce the last dimension of their first argument."""
NUM_ROWS = 128
"""Rows on which each operator is checked: the largest row count of a forward pass."""
MAX_DISTINCT_OUTPUTS = 1024
MAX_CALLS = 6
"""Calls of an operator per size."""
BATCH_SIZES = (2, 3, 5, 8, 31, 64)
"""Numbers of matrices in a batched product. `DeterministicAttention` never multiplies a single one."""


@dataclass(frozen=True)
class Reduction:
    """A call of an operator, with layouts instead of tensors.

    `left`: index of the rows argument, which a product's matrix follows. `rows_dim`: the dimension that
    counts the rows. `batched`: a batched product, whose matrices count as rows.
    """

    operator: OpOverload
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    left: int
    rows_dim: int

    @property
    def is_product(self) -> bool:
        return self.operator in LEFT_OPERAND

    @property
    def batched(self) -> bool:
        return self.operator is aten.bmm.default


@dataclass(frozen=True)
class _Layout:
    """The layout of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ReductionRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the distinct reductions called while it is active, in forward passes of `num_rows` rows."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._num_rows = num_rows
        self._calls: dict[Reduction, None] = {}

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        return tuple(self._calls)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        call = _read(func, args, options, self._num_rows)
        if call is not None:
            self._calls[call] = None
        return func(*args, **options)


def _read(
    operator: OpOverload, args: tuple[Any, ...], options: dict[str, Any], num_rows: int
) -> Reduction | None:
    if operator not in LEFT_OPERAND and operator not in ROW_REDUCTIONS:
        return None
    left = LEFT_OPERAND.get(operator, 0)
    shape = args[left].shape
    if operator in (aten.mean.dim, aten.sum.dim_IntList) and args[1] not in ([-1], [len(shape) - 1]):
        # Not a reduction of single rows.
        return None
    if operator is aten.bmm.default:
        rows_dim = 0
    elif num_rows in shape[:-1]:
        rows_dim = shape.index(num_rows)
    else:
        # Independent of the forward pass's rows.
        return None
    # Attention multiplies varying numbers of matrices; the self-check chooses them itself.
    layouts = tuple(_layout(arg[:1] if operator is aten.bmm.default else arg) for arg in args)
    return Reduction(
        operator, layouts, tuple((name, _layout(value)) for name, value in options.items()), left, rows_dim
    )


def _layout(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return _Layout(tuple(arg.shape), tuple(arg.stride()), arg.dtype, arg.device)
    return tuple(arg) if isinstance(arg, list) else arg


class ReductionSelfCheck:
    """Whether a reduction gives a row the same bits at any position and with any number of rows.

    `base_size`: the number of rows, or of matrices, with which other sizes are compared.
    """

    def __init__(self, call: Reduction, base_size: int) -> None:
        self._call = call
        generator = torch.Generator().manual_seed(0)
        self._rows, self._matrix = _operands(call, generator)
        self._args = [_zeros(arg) if isinstance(arg, _Layout) else _plain(arg) for arg in call.args]
        found = [self._run(at, base_size) for at in range(0, NUM_ROWS, base_size)]
        self._expected = torch.cat(found, call.rows_dim)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The sizes to check; None: those of the forward pass."""
        return BATCH_SIZES if self._call.batched else None

    def agrees(self, size: int) -> bool:
        """Whether calls with `size` rows give the same bits as with `base_size`."""
        # Odd starts, so that each row has another position and other neighbours than with `base_size`.
        step = max(size, NUM_ROWS // MAX_CALLS) | 1
        return all(
            torch.equal(self._run(start, size), self._pick(self._expected, start, size))
            for start in range(3, 3 + NUM_ROWS, step)
        )

    def _pick(self, rows: torch.Tensor, start: int, size: int) -> torch.Tensor:
        at = (torch.arange(start, start + size) % NUM_ROWS).to(rows.device)
        return rows.index_select(self._call.rows_dim, at)

    def _run(self, start: int, size: int) -> torch.Tensor:
        call = self._call
        args = list(self._args)
        args[call.left] = self._pick(self._rows, start, size)
        if self._matrix is not None:
            args[call.left + 1] = self._matrix
            if call.batched:
                # Keeps the memory order of the recorded call's dimensions, which `index_select` changes.
                args[call.left + 1] = self._pick(self._matrix.mT, start, size).mT
        # As the model runs: outside of this mode torch decomposes some operators.
        with torch.inference_mode():
            found = call.operator(*args, **dict(call.options))
        result: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return result


def _operands(call: Reduction, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`NUM_ROWS` rows, or left matrices, and a product's right operand."""
    layout = call.args[call.left]
    shape = list(layout.shape)
    shape[call.rows_dim] = NUM_ROWS
    depth = shape[-1]
    # Terms of equal magnitude would add exactly: products of bfloat16 have 16 bits, sums have 24.
    exponents = torch.randint(-8, 9, shape, generator=generator)
    rows = torch.ldexp(torch.randn(shape, generator=generator), exponents).to(layout.dtype)
    # Each term and its opposite are at random positions of the depth.
    order = torch.randperm(depth, generator=generator)
    positive, negative = order[: depth // 2], order[depth // 2 : depth // 2 * 2]
    rows[..., negative] = -rows[..., positive]
    matrix = _mirrored(call, positive, negative, generator) if call.is_product else None
    return rows.to(layout.device), matrix


def _mirrored(
    call: Reduction, positive: torch.Tensor, negative: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """A matrix with the same factor for opposite terms of a row, in the recorded layout."""
    layout = call.args[call.left + 1]
    shape, strides = list(layout.shape), list(layout.stride)
    if call.batched:
        shape[0], strides[0] = NUM_ROWS, shape[1] * shape[2]
    matrix = torch.empty_strided(shape, strides, dtype=layout.dtype, device=layout.device)
    # A linear layer's weight is [outputs, depth], others' [..., depth, outputs].
    by_output = matrix if call.operator is aten.linear.default else matrix.mT
    # Many outputs repeat the factors, which avoids a large copy in float32.
    distinct = min(by_output.shape[-2], MAX_DISTINCT_OUTPUTS)
    factors = torch.randn([*by_output.shape[:-2], distinct, by_output.shape[-1]], generator=generator)
    factors[..., negative] = factors[..., positive]
    for at in range(0, by_output.shape[-2], distinct):
        part = by_output[..., at : at + distinct, :]
        part.copy_(factors[..., : part.shape[-2], :])
    return matrix


def _zeros(layout: _Layout) -> torch.Tensor:
    # Large operands are filled in later; only biases and norm weights are used as they are.
    shape = layout.shape if len(layout.shape) == 1 else (0,)
    return torch.zeros(shape, dtype=layout.dtype, device=layout.device)


def _plain(arg: Any) -> Any:
    return list(arg) if isinstance(arg, tuple) else arg
