"""The errors that the engine raises on purpose; each message says what to do."""


class EngineError(Exception):
    """Base class of every error raised on purpose by the engine."""


class InvalidParameter(EngineError, ValueError):
    """A value that a user gave is out of range: `field` names it as the user wrote it, `message` says why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NeverFits(InvalidParameter):
    """The request is larger than a limit of this engine, so that it would wait for ever."""


class IllegalTransition(EngineError):
    """A sequence was asked to enter a status that it cannot reach from where it is."""


class BlockTableOverrun(EngineError):
    """A step would compute a token for which its sequence holds no KV block: the scheduler is at fault."""


class UnsupportedModel(EngineError):
    """The model is of a kind that cannot be served rightly: its attention, its type or its weights."""


class DeviceLost(EngineError):
    """The device does not answer any more; nothing computed on it can be trusted."""


class EngineDead(EngineError):
    """No part of a step could be executed. End the process: its requests go on elsewhere."""
