"""The tools of a chat, and which of them its answer may or must call."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api_error import invalid
from services.gateway.bodies import ChatBody, NamedTool, Tool
from services.gateway.numbers import check_numbers

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    tools: tuple[Tool, ...]
    """What the model is told of."""
    named: str | None = None
    """The only tool that may be called."""
    required: bool = False
    """Whether the answer is a call."""
    several: bool = True
    """Whether it may have several calls."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.named is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.function.name == self.named)

    @property
    def strict(self) -> bool:
        """Whether some tool insists on its schema."""
        return any(tool.function.strict for tool in self.tools)

    def described(self) -> tuple[dict[str, Any], ...]:
        """As chat templates read them."""
        return tuple(_described(tool) for tool in self.tools)


def tool_use(body: ChatBody) -> ToolUse | None:
    """None if nothing can be called. ApiError 400 names what does not fit."""
    use, choice = tools_of(body.tools or ()), body.tool_choice
    if use is None and choice not in (None, "none"):
        invalid("tool_choice", "there are no tools to choose from; give tools")
    if use is None or choice == "none":
        return None
    named = choice.function.name if isinstance(choice, NamedTool) else None
    use = msgspec.structs.replace(
        use,
        named=named,
        required=choice not in (None, "auto"),
        several=named is None and body.parallel_tool_calls is not False,
    )
    if not use.callable:
        invalid("tool_choice.function.name", "is the name of none of the tools")
    return use


def tools_of(tools: Sequence[Tool]) -> ToolUse | None:
    """Tools that may be called. ApiError 400 names the one that does not fit."""
    if len(tools) > MAX_TOOLS:
        invalid("tools", f"at most {MAX_TOOLS} tools")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{number}].function"
        if not _NAME.fullmatch(name):
            invalid(f"{where}.name", "must be 1 to 64 letters, digits, dots, _ or -")
        if name in names:
            invalid(f"{where}.name", f"there is another tool {name!r}")
        names.add(name)
        check_numbers(tool.function.parameters, f"{where}.parameters")
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            invalid(f"{where}.parameters", "must be the schema of a JSON object")
    return ToolUse(tools=tuple(tools)) if tools else None


def _described(tool: Tool) -> dict[str, Any]:
    """`strict` is not for the model."""
    function = tool.function
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    found["parameters"] = function.schema
    return {"type": "function", "function": found}
