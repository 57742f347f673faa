"""A Python function as a tool: schema from signature and docstring, arguments from JSON. Pure."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import AnswerMismatch, InvalidArgument
from slipstream.typed.type_schema import Schema, schema_of
from slipstream.typed.type_value import value_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
# "x: text" or "x (int): text" of Google's style, and ":param x: text".
_GOOGLE = re.compile(r"^(?P<indent>\s+)(?P<name>\w+)(?: \([^)]*\))?: (?P<text>.+)$")
_SPHINX = re.compile(r"^\s*:param (?:[^:]+ )?(?P<name>\w+): (?P<text>.+)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):\s*$")
_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


class ToolError(Exception):
    """Raised by a tool's function: the model reads the message as the call's result, and goes on."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """One function, with the type of each argument. The docstring describes it to the model."""

    function: Callable[..., Any]
    name: str
    description: str
    kinds: dict[str, Any]
    parameters: Schema

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionTool:
        """The tool of a function. Raises InvalidArgument for a signature that JSON arguments cannot fill."""
        name = getattr(function, "__name__", type(function).__name__)
        field = f"functions.{name}"
        if not _NAME.fullmatch(name):
            raise InvalidArgument(field, "must have a name of letters, digits, _ and -")
        kinds, required = _parameters(function, field)
        text, notes = _documentation(inspect.getdoc(function) or "")
        properties = {key: schema_of(kind, f"{field}.{key}") for key, kind in kinds.items()}
        for key, schema in properties.items():
            if key in notes:
                schema.setdefault("description", notes[key])
        return cls(function, name, text, kinds, _hoisted(properties, required))

    def as_openai(self) -> dict[str, Any]:
        """The tool as a request declares it. The cluster holds arguments to the schema."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
                "strict": True,
            },
        }

    def arguments(self, text: str) -> dict[str, Any]:
        """The arguments of a call. Raises ToolError with words for the model."""
        try:
            data = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments are not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ToolError("the arguments are not an object")
        missing = [name for name in self.parameters["required"] if name not in data]
        unknown = [name for name in data if name not in self.kinds]
        if missing or unknown:
            raise ToolError(f"arguments missing: {missing}, unknown: {unknown}")
        try:
            return {name: value_of(self.kinds[name], item, name) for name, item in data.items()}
        except AnswerMismatch as error:
            raise ToolError(error.message) from None


def tools_of(functions: Sequence[Callable[..., Any]]) -> dict[str, FunctionTool]:
    """The tools by name. Raises InvalidArgument, also for two functions of one name."""
    tools: dict[str, FunctionTool] = {}
    for function in functions:
        tool = FunctionTool.of(function)
        if tool.name in tools:
            raise InvalidArgument(f"functions.{tool.name}", "is there twice")
        tools[tool.name] = tool
    return tools


def _parameters(function: Callable[..., Any], field: str) -> tuple[dict[str, Any], list[str]]:
    """The types of the parameters, and the names of those without a default."""
    signature = inspect.signature(function)
    target = function if inspect.isroutine(function) else type(function).__call__
    hints = typing.get_type_hints(target, include_extras=True)
    kinds, required = {}, []
    for name, parameter in signature.parameters.items():
        if parameter.kind in _BY_POSITION:
            raise InvalidArgument(f"{field}.{name}", "must be a parameter that has a name in calls")
        if name not in hints:
            raise InvalidArgument(f"{field}.{name}", "must have a type")
        kinds[name] = hints[name]
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    return kinds, required


def _hoisted(properties: dict[str, Schema], required: list[str]) -> Schema:
    """The schema of the arguments: references are resolved from its root."""
    definitions: Schema = {}
    for schema in properties.values():
        definitions |= schema.pop("$defs", {})
    made: Schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {**made, "$defs": definitions} if definitions else made


def _documentation(text: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring about the function, and about each parameter."""
    lines, notes, section = [], {}, ""
    for line in text.splitlines():
        heading, sphinx = _SECTION.match(line), _SPHINX.match(line)
        if heading:
            section = heading[1]
        elif sphinx:
            notes[sphinx["name"]] = sphinx["text"].strip()
        elif section:
            note = _GOOGLE.match(line)
            if note and section in ("Args", "Arguments", "Parameters"):
                notes[note["name"]] = note["text"].strip()
        elif not line.lstrip().startswith(":"):
            lines.append(line)
    return "\n".join(lines).strip(), notes
