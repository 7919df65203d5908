"""The errors that the engine raises."""


class EngineError(Exception):
    """Base class of the engine's errors."""


class InvalidParameter(EngineError, ValueError):
    """A parameter has an invalid value. `field`: its name in the request or configuration."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NeverFits(InvalidParameter):
    """The request exceeds a limit of this engine, and could never be scheduled."""


class IllegalTransition(EngineError):
    """A sequence cannot change to the requested status from its current one."""


class BlockTableOverrun(EngineError):
    """A step would compute a token outside of its sequence's KV blocks: a defect of the scheduler."""


class UnsupportedModel(EngineError):
    """The model's architecture, attention or weights are not supported."""


class DeviceLost(EngineError):
    """The device has failed. Its results cannot be trusted."""


class EngineDead(EngineError):
    """No part of a step could be executed. The process must end; its requests continue elsewhere."""
