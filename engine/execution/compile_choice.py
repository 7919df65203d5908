"""Where the layers of a model may be compiled.

Law: what was asked for is taken or refused, never replaced. Knows no model.
"""

from engine.errors import InvalidParameter
from engine.validation import boolean


def check_compile(compile: bool, *, deterministic: bool, quantization: str) -> None:
    """Raise `InvalidParameter` for what cannot be had."""
    boolean("compile", compile)
    if compile and deterministic:
        raise InvalidParameter(
            "compile", "compiled layers give other bits for other numbers of rows; not with deterministic"
        )
    if compile and quantization != "none":
        raise InvalidParameter("compile", f"is for plain weights, not for {quantization}")
