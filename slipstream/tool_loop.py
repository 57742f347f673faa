"""The tool loop of one conversation: which calls to run, and the messages of the next request. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InvalidArgument
from slipstream.replies import Reply, ToolCall
from slipstream.requests import ChatArguments, Message
from slipstream.typed.function_tool import ToolError, tools_of
from slipstream.typed.type_value import json_text

MAX_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class ToolRun:
    """The end of a tool loop: the last reply, and all messages with that reply, for the next question."""

    reply: Reply
    messages: list[Message]


class ToolLoop:
    """One conversation: `arguments` and `messages` of a request, then `add_reply`, until it ends."""

    def __init__(
        self,
        messages: Sequence[Message],
        functions: Sequence[Callable[..., Any]],
        arguments: ChatArguments,
        max_rounds: int,
    ) -> None:
        """Raises InvalidArgument for functions that are no tools, and for arguments that the loop sets."""
        if arguments.get("tools") is not None:
            raise InvalidArgument("tools", "are those of the functions here")
        if (arguments.get("n") or 1) != 1:
            raise InvalidArgument("n", "must be 1 in a tool loop")
        if max_rounds < 1:
            raise InvalidArgument("max_rounds", f"must be at least 1, not {max_rounds}")
        self.messages: list[Message] = list(messages)
        self._tools = tools_of(functions)
        self._declared = [tool.as_openai() for tool in self._tools.values()]
        self._arguments = arguments
        self._rounds_left = max_rounds
        self._begun = False

    @property
    def arguments(self) -> ChatArguments:
        """The arguments of the next request. After the last round the model answers without a call."""
        arguments: ChatArguments = {**self._arguments, "tools": self._declared}
        if not self._rounds_left:
            arguments["tool_choice"] = "none"
        elif self._begun and _is_forced(arguments.get("tool_choice")):
            arguments["tool_choice"] = "auto"  # the first round has followed it
        return arguments

    def add_reply(self, reply: Reply) -> list[ToolCall]:
        """Append the reply. Returns the calls to run, in order; none: the loop has ended."""
        self._begun = True
        self.messages.append(reply.as_message())
        if reply.finish_reason != "tool_calls":
            return []
        self._rounds_left -= 1
        return reply.tool_calls

    def start(self, call: ToolCall) -> Any:
        """Call the function. Returns its result, or an awaitable of one. Raises ToolError."""
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no function {call.name}")
        return tool.function(**tool.arguments(call.arguments))

    def answer(self, call: ToolCall, result: Any) -> None:
        """Append the result of a call, or the message of a ToolError."""
        if inspect.iscoroutine(result):
            result.close()
            raise InvalidArgument(f"functions.{call.name}", "is a coroutine function: use AsyncClient")
        text = json_text({"error": str(result)} if isinstance(result, ToolError) else result)
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def _is_forced(choice: object) -> bool:
    return choice == "required" or (isinstance(choice, Mapping) and "function" in choice)
