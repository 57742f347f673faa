"""The conversation of `slipstream chat`.

Ctrl-C ends the answer that is being written, or drops the line that is typed. Ctrl-D ends the conversation.
Where the model calls a tool, the terminal asks for what the tool should answer. What is printed of others has
no control characters.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.cli.chat.commands import TypedLine, help_text, read_line, tools_text
from slipstream.cli.chat.harmless_text import harmless, harmless_line
from slipstream.cli.chat.line_input import Ask, line_reader
from slipstream.cli.client_access import ClientAccess
from slipstream.client import Client
from slipstream.credentials.bounded_file import read_bounded
from slipstream.errors import InvalidArgument, PermissionDenied, SlipstreamError, Unauthenticated
from slipstream.replies import Reply, ToolCall
from slipstream.requests import ChatArguments, Tool

# What a tool answers where the user says nothing.
FAILED = '{"error": "failed"}'


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of the command line."""

    access: ClientAccess
    system: str | None
    tools: Sequence[Tool]
    arguments: ChatArguments


def read_tools(path: Path) -> list[Tool]:
    """The tools declared in a JSON file. `InvalidArgument` if it holds no list of objects."""
    try:
        tools = json.loads(read_bounded(path))
    except OSError as error:
        raise InvalidArgument("--tools", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("--tools", f"{path} is not JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidArgument("--tools", f"{path} holds no list of tools")
    return tools


def run_chat(options: ChatOptions, *, ask: Ask | None = None) -> bool:
    """Talk until the input ends. `ask` shows a prompt and returns a line; EOFError at the end.

    Returns whether the last turn did not fail.
    """
    # Asked once: a second answer of the admin port may name other routers than the greeting.
    endpoint, tls = options.access.router()
    with Client(endpoint, api_key=options.access.api_key, tls=tls) as client:
        return _ChatLoop(client, options, ask or line_reader()).run(endpoint)


class _ChatLoop:
    """The messages so far, and what the user types."""

    def __init__(self, client: Client, options: ChatOptions, ask: Ask) -> None:
        self._client = client
        self._tools = options.tools
        self._system = options.system
        self._options = options.arguments
        self._ask = ask
        self._explained = False
        self._start()

    def run(self, endpoint: str) -> bool:
        """Talk until the input ends. Returns whether the last turn did not fail."""
        print(self._greeting(endpoint))
        succeeded, was_interrupted = True, False
        while True:
            try:
                typed = read_line(self._ask("you> "))
            except EOFError:
                print()
                return succeeded
            except KeyboardInterrupt:  # it drops the line that is being typed
                print()
                if was_interrupted:
                    return succeeded
                print("(Ctrl-D, or Ctrl-C again, ends the conversation)")
                was_interrupted = True
                continue
            was_interrupted = False
            if typed.command == "/quit":
                return succeeded
            if typed.command:
                self._command(typed)
            elif typed.text:
                succeeded = self._turn(typed.text)

    def _start(self) -> None:
        """Forget all messages; a new session, so that the cluster does not join it with the old one."""
        self._messages: list[dict[str, Any]] = []
        self._arguments: ChatArguments = {"session": f"chat-{secrets.token_hex(4)}", **self._options}
        if self._system:
            self._messages.append({"role": "system", "content": self._system})
        if self._tools:
            self._arguments["tools"] = self._tools

    def _greeting(self, endpoint: str) -> str:
        try:
            model = ", ".join(self._client.models(timeout_s=5.0))
        except SlipstreamError as error:
            if _is_final(error):
                raise
            model = "the model"  # the first turn says what is wrong
        tools = f" {len(self._tools)} tools: you answer its calls." if self._tools else ""
        return harmless_line(f"{model} at {endpoint}.{tools} /help lists the commands, Ctrl-D ends.")

    def _command(self, typed: TypedLine) -> None:
        if typed.unknown:
            print(f"{harmless_line(typed.command)}: no such command; /help lists them")
        elif typed.command == "/help":
            print(help_text())
        elif typed.command == "/tools":
            print(tools_text(self._tools))
        else:
            if typed.command == "/system":
                self._system = typed.text or None
            self._start()
            print("A new conversation.")

    def _turn(self, text: str) -> bool:
        """Send a message. Returns whether it did not fail; a failed turn is left out of the conversation."""
        turn: list[dict[str, Any]] = [{"role": "user", "content": text}]
        try:
            self._answer(turn)
        except SlipstreamError as error:
            if _is_final(error):
                raise
            print(f"error: {harmless(error.message)}", file=sys.stderr)
            return False
        except (EOFError, KeyboardInterrupt):
            print("\n(cut short)")
        self._messages += turn
        return True

    def _answer(self, turn: list[dict[str, Any]]) -> None:
        """The replies to the last message, tool calls between them; appended to `turn` as they end."""
        while True:
            reply = _stream(self._client, [*self._messages, *turn], self._arguments, turn)
            if not reply.tool_calls:
                return
            for call in reply.tool_calls:
                turn.append({"role": "tool", "tool_call_id": call.id, "content": self._result(call)})

    def _result(self, call: ToolCall) -> str:
        """The user's answer in place of a tool."""
        print(harmless_line(f"The model calls {call.name}({call.arguments})."))
        if not self._explained:
            self._explained = True
            print('Type what it returns, such as {"status": "shipped"}; an empty line says that it failed.')
        return self._ask(f"{harmless_line(call.name)} returns> ").strip() or FAILED


def _is_final(error: SlipstreamError) -> bool:
    """Whether no later turn can succeed: the key is refused, here or by the router."""
    if isinstance(error, InvalidArgument):
        return error.field == "api_key"
    return isinstance(error, Unauthenticated | PermissionDenied)


def _stream(
    client: Client, messages: list[dict[str, Any]], arguments: ChatArguments, turn: list[dict[str, Any]]
) -> Reply:
    stream = client.stream_chat(messages, **arguments)
    try:
        for event in stream:
            print(harmless(event.reasoning + event.text), end="", flush=True)
    finally:
        stream.close()
        # Also when cut short: the model should know what it has said, but half a call is no call.
        whole = bool(stream.reply.finish_reason)
        if whole or (stream.reply.text and not stream.reply.tool_calls):
            turn.append(stream.reply.as_message())
    print()
    print(harmless_line(_summary(stream.reply)))
    return stream.reply


def _summary(reply: Reply) -> str:
    """Where the reply was made and what it took, on one line."""
    usage, stats = reply.usage, reply.stats
    if usage is None or stats is None:
        return f"[{reply.finish_reason}]"
    workers = " -> ".join(name for name in (stats.prefill_worker, stats.decode_worker) if name)
    speed = (usage.completion_tokens - 1) / stats.decode_ms * 1e3 if stats.decode_ms else 0.0
    return (
        f"[{workers}; {usage.prompt_tokens} prompt tokens, "
        f"{usage.cached_tokens} cached; first token after {stats.ttft_ms:.0f} ms, {speed:.0f} tokens/s; "
        f"{reply.finish_reason}]"
    )
