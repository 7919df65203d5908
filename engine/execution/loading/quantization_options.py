"""Which words name a way to keep weights, and where each may be used.

Law: what was asked for is taken or refused, never replaced. A model with quantised weights is not the model
that it was made of, and its fingerprint says so. Knows no model.
"""

import torch

from engine.errors import InvalidParameter

QUANTIZATION = ("none", "int8", "int4")


def check_quantization(quantization: str, *, deterministic: bool, device: torch.device) -> None:
    """Raise `InvalidParameter` for what cannot be had."""
    if quantization not in QUANTIZATION:
        raise InvalidParameter("quantization", f"must be {', '.join(QUANTIZATION)}, not {quantization!r}")
    if quantization == "none":
        return
    if deterministic:
        raise InvalidParameter("quantization", "deterministic numerics are for plain weights; use none")
    if device.type != "cpu":
        raise InvalidParameter("quantization", f"{quantization} is for a CPU, not {device.type}; use none")


def quantized_fingerprint(fingerprint: str, quantization: str) -> str:
    """That of the model as it is served, from that of its files."""
    return fingerprint if quantization == "none" else f"{fingerprint}-{quantization}"
