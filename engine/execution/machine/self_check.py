"""Helpers for the self-checks of compiled operators, which compare them with torch on this machine."""

from collections.abc import Callable

import torch

from engine.execution.machine.native_build import CannotBuild


def seeded_randn() -> Callable[..., torch.Tensor]:
    """A function `(*shape, dtype)` that returns normally distributed tensors, the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return randn


def check_close(name: str, found: torch.Tensor | None, expected: torch.Tensor, tolerance: float) -> None:
    """Raise `CannotBuild` unless `found`, the result of operator `name`, is close to `expected`.

    `tolerance`: largest difference relative to an element, absolute for elements below 1.
    """
    difference = float("nan")
    if found is not None:
        difference = float(((found - expected).abs() / expected.abs().clamp(min=1)).max())
    # NaN must fail too.
    if not difference <= tolerance:
        raise CannotBuild(
            f"the compiled {name} disagrees with torch by {difference:.2g}"
            f" in {torch.float32 if found is None else found.dtype} on this machine"
        )
