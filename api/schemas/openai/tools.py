"""The tools of a request: what the model may call, and whether it must."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from api.problems import bad_field
from api.schemas.openai.closed_schemas import closed
from api.schemas.openai.shared import Tolerant
from api.schemas.openai.tool_schemas import all_calls_schema

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}


class FunctionDefinition(Tolerant):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(Tolerant):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class ResponseTool(Tolerant):
    """A tool of a response, with the members of its function at the same level."""

    # First, so that another kind of tool is refused as such.
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def to_definition(self) -> ToolDefinition:
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters
        )
        return ToolDefinition(type="function", function=function)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode`: `none`, `auto`, `required`, or `named` with the `name` of the function."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""


def _to_choice(value: object) -> object:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if value is None:
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        # Chat completions have a member `function`; responses have the name at the same level.
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return ToolChoice("named", name)
    raise ValueError('must be "none", "auto", "required" or a function: {"type": "function", ...}')


ToolChoiceField = Annotated[ToolChoice | None, BeforeValidator(_to_choice), WithJsonSchema(_CHOICE_SCHEMA)]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. `choice`: None for the default, `auto`."""

    tools: list[ToolDefinition]
    choice: ToolChoice | None
    parallel: bool

    @property
    def effective_choice(self) -> ToolChoice:
        """`none` without tools."""
        return (self.choice or ToolChoice("auto")) if self.tools else ToolChoice("none")

    def to_json(self) -> dict[str, Any]:
        """The arguments of `api.tool_calls.reading.CallReading`."""
        return {**asdict(self.effective_choice), "parallel": self.parallel}

    @property
    def functions(self) -> list[tuple[str, dict[str, Any] | None]]:
        """Names and schemas of parameters."""
        return [(tool.function.name, tool.function.parameters) for tool in self.tools]

    def task_values(self, *, is_constrained: bool) -> dict[str, Any]:
        """The fields of the task: the tools and, where a call is required, the grammar of the call.

        `is_constrained`: whether the request has `structured_outputs`. Raises `Problem` (400).
        """
        self._check_choice()
        choice = self.effective_choice
        if choice.mode == "none":
            return {}
        values: dict[str, Any] = {
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
            # Where a tool's marks are special tokens, they must stay in the text.
            "skip_special_tokens": choice.mode != "auto",
        }
        if choice.mode == "auto":
            return values
        if is_constrained:
            raise bad_field("tool_choice", "cannot be combined with structured_outputs")
        return {**values, "structured_outputs": {"json": self._call_schema(choice)}}

    def _check_choice(self) -> None:
        choice = self.choice
        if choice is None or choice.mode in ("none", "auto"):
            return
        if not self.tools:
            raise bad_field("tool_choice", "requires tools")
        if choice.mode == "named" and choice.name not in dict(self.functions):
            raise bad_field("tool_choice", f"there is no tool of the name {choice.name[:128]!r}")

    def _call_schema(self, choice: ToolChoice) -> dict[str, Any]:
        if choice.mode == "named":
            return closed(dict(self.functions)[choice.name]) or {"type": "object"}
        functions = [(name, closed(parameters)) for name, parameters in self.functions]
        return all_calls_schema(functions, parallel=self.parallel)
