"""The meaning of a typed line: a message to the model, or a command that begins with a slash. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.cli.chat.harmless_text import harmless_line
from slipstream.requests import Tool

COMMANDS = {
    "/help": "show this list",
    "/tools": "show the tools that the model may call",
    "/system TEXT": "set the system prompt, and start again",
    "/clear": "start a new conversation",
    "/quit": "end; so do /exit and Ctrl-D",
}
_ALIASES = {"/exit": "/quit", "/?": "/help"}
_NAMES = {name.split()[0] for name in COMMANDS}


@dataclass(frozen=True, slots=True)
class TypedLine:
    """A line: `command` is empty for a message. `unknown` commands are not sent to the model."""

    command: str
    text: str
    unknown: bool = False


def read_line(line: str) -> TypedLine:
    """Parse a typed line. A message that begins with a slash is typed with two."""
    line = line.strip()
    if line.startswith("//"):
        return TypedLine("", line[1:])
    if not line.startswith("/"):
        return TypedLine("", line)
    name, _, rest = line.partition(" ")
    command = _ALIASES.get(name, name)
    return TypedLine(command, rest.strip(), unknown=command not in _NAMES)


def help_text() -> str:
    """The commands and keys."""
    lines = [f"  {name:<13} {meaning}" for name, meaning in COMMANDS.items()]
    lines.append("  Ctrl-C        end the answer that is being written, or drop the line that is typed")
    return "\n".join([*lines, "A message that begins with a slash is typed with two."])


def tools_text(tools: Sequence[Tool]) -> str:
    """One line a tool: its call and what it does."""
    if not tools:
        return "The model has no tools; `--tools FILE` declares some."
    lines = [_tool_line(tool.get("function")) for tool in tools]
    return "\n".join([*lines, "You answer the calls: type what the tool would return."])


def _tool_line(function: Any) -> str:
    if not isinstance(function, dict):
        return "  (not a function)"
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    names = ", ".join(properties) if isinstance(properties, dict) else ""
    return harmless_line(f"  {function.get('name')}({names}): {function.get('description') or ''}")
