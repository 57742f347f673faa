"""OpenAI-shaped arguments -> `GenerateRequest`. Pure.

Arguments that no message can hold are refused here, with the router's messages. The router checks values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from slipstream import bounds
from slipstream.bound import Range, shown, shown_name
from slipstream.enum_names import MESSAGE_ROLES, PRIORITIES, TOOL_CHOICE_MODES
from slipstream.errors import InvalidArgument
from slipstream.sampling import SamplingArguments
from slipstream.typed.type_schema import schema_of
from slipstream.v1 import router_pb2

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# The fields of a message that are plain text.
MESSAGE_TEXTS = ("name", "reasoning_content", "tool_call_id")
# The names of the mark that the answer continues a message.
PARTIAL_FLAGS = ("partial", "prefix")


class GenerateArguments(SamplingArguments, total=False):
    """How to generate. What is left out or None takes the default; bounds are in docs/bounds.md."""

    model: str | None
    session: str | None  # sent as x-session-affinity: later requests of a session find its KV again
    headers: Mapping[str, str] | None  # further metadata of the call
    timeout_s: float | None
    request_id: str | None
    stop: str | Sequence[str] | None
    thinking: bool | None  # left out: as the model does by default
    keeps_reasoning: bool | None  # the reasoning of all earlier answers stays in the prompt
    metadata: Mapping[str, str] | None
    priority: str | None  # interactive | default | bulk
    reject_if_busy: bool | None  # refused with Overloaded at once rather than wait for capacity
    # The form of the answer: one of json_object (True), json_schema, regex, choice, grammar.
    output: Mapping[str, Any] | None
    n: int | None  # answers to generate; `Reply.choices` has them
    echo: bool | None  # of `complete`: the prompt's text stands first; `max_tokens` 0 answers it alone


class ChatArguments(GenerateArguments, total=False):
    """The arguments of GenerateArguments, and the tools the model may call, OpenAI-shaped."""

    tools: Sequence[Tool] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None  # False: the answer ends after its first call
    # The router stores the answer: `Reply.response_id` continues it. Such an answer moves to no other router.
    store: bool | None
    # A stored answer that goes on, with its whole conversation before `messages`.
    previous_response_id: str | None


_SAMPLING = {field.name for field in router_pb2.Sampling.DESCRIPTOR.fields} - {"logit_bias", "stop_token_ids"}
_PLAIN = {"model", "request_id", "thinking", "keeps_reasoning", "reject_if_busy", "n", "echo"}
_PLAIN |= {"parallel_tool_calls", "store", "previous_response_id"}
_CALL_ONLY = {"session", "headers", "timeout_s"}
_EXPECTED = {
    FieldDescriptor.TYPE_STRING: "a string",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "true or false",
}


def chat_request(messages: Sequence[Message], arguments: ChatArguments) -> router_pb2.GenerateRequest:
    """A chat request from OpenAI-shaped messages and tools. Raises InvalidArgument with the field's path."""
    request = router_pb2.GenerateRequest()
    request.chat.SetInParent()
    for index, message in enumerate(messages):
        request.chat.messages.append(_message(message, f"messages[{index}]"))
    for index, tool in enumerate(arguments.get("tools") or ()):
        request.chat.tools.append(_tool(tool, f"tools[{index}]"))
    if (choice := arguments.get("tool_choice")) is not None:
        request.chat.tool_choice.CopyFrom(_tool_choice(choice))
    rest = {name: value for name, value in arguments.items() if name not in ("tools", "tool_choice")}
    _apply(rest, request)
    return request


def call_timeout_s(arguments: GenerateArguments, default_s: float) -> float:
    """The time-out of a call with these arguments, in seconds."""
    timeout_s = arguments.get("timeout_s")
    return default_s if timeout_s is None else timeout_s


def with_form(arguments: ChatArguments, response_format: type | None) -> ChatArguments:
    """The arguments with the form of a type. Raises InvalidArgument beside another form."""
    if response_format is None:
        return arguments
    if arguments.get("output") is not None:
        raise InvalidArgument("output", "must be left out with response_format")
    return {**arguments, "output": {"json_schema": schema_of(response_format)}}


def prompt_request(prompt: str | Sequence[int], arguments: GenerateArguments) -> router_pb2.GenerateRequest:
    """A request to go on with a text or with token ids. Raises InvalidArgument with the field's path."""
    request = router_pb2.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "prompt", prompt)
    else:
        _set_token_ids(request, prompt)
    _apply(dict(arguments), request)
    return request


def _set_token_ids(request: router_pb2.GenerateRequest, token_ids: Any) -> None:
    try:
        if isinstance(token_ids, bytes | bytearray | Mapping):  # which iterate over numbers too
            raise TypeError
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(token_ids)
    except (TypeError, ValueError):
        raise bounds.TYPE.refused("prompt", expected="a string or a list of token ids") from None


def tokenize_request(prompt: str | Sequence[Message], arguments: ChatArguments) -> router_pb2.TokenizeRequest:
    """The question for the tokens of a text or of messages. Raises InvalidArgument by the field."""
    if isinstance(prompt, str):
        return router_pb2.TokenizeRequest(request=prompt_request(prompt, arguments))
    return router_pb2.TokenizeRequest(request=chat_request(prompt, arguments))


def detokenize_request(token_ids: Iterable[int]) -> router_pb2.DetokenizeRequest:
    """The question for the text of tokens. Raises InvalidArgument."""
    request = router_pb2.DetokenizeRequest()
    _extend(request.token_ids, "token_ids", token_ids)
    return request


def _apply(arguments: Mapping[str, Any], request: router_pb2.GenerateRequest) -> None:
    for name, value in arguments.items():
        if value is None or name in _CALL_ONLY:
            continue
        if name in _SAMPLING:
            _set(request.sampling, name, value)
        elif name in _PLAIN:
            _set(request, name, value)
        elif name == "stop_token_ids":
            _extend(request.sampling.stop_token_ids, name, value)
        elif name in ("logit_bias", "metadata"):
            _fill(request.sampling.logit_bias if name == "logit_bias" else request.metadata, name, value)
        elif name == "output":
            request.output.CopyFrom(_output(value))
        elif name == "priority":
            if not isinstance(value, str):
                raise bounds.TYPE.refused("priority", expected="a string")
            if value not in PRIORITIES.values:
                raise bounds.PRIORITY.refused("priority")
            request.priority = PRIORITIES.value(value)
        elif name == "stop":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
                raise bounds.TYPE.refused("stop", expected="a string or a list of strings")
            request.stop.extend(texts)
        else:
            raise TypeError(f"unexpected argument {name!r}")


def _output(output: Any) -> router_pb2.OutputFormat:
    if not isinstance(output, Mapping) or len(output) != 1:
        raise bounds.TYPE.refused("output", expected="a mapping with one entry")
    ((kind, content),) = output.items()
    made = router_pb2.OutputFormat()
    if kind not in made.DESCRIPTOR.fields_by_name:
        raise bounds.UNKNOWN_FIELD.refused(f"output.{shown_name(str(kind))}")
    if kind == "choice":
        _fill_texts(made.choice.texts, content, "output.choice")
        return made
    if kind == "json_schema" and not isinstance(content, str):
        try:
            content = json.dumps(content)
        except (TypeError, ValueError, RecursionError):
            raise bounds.OUTPUT_SCHEMA.refused() from None
    _set(made, kind, content, "output")
    return made


def _fill_texts(target: Any, texts: Any, name: str) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise bounds.TYPE.refused(name, expected="a list of strings")
    try:
        target.extend(texts)
    except (TypeError, UnicodeEncodeError):
        raise bounds.TYPE.refused(name, expected="a list of strings") from None


def _set(target: Any, name: str, value: Any, path: str = "") -> None:
    where = f"{path}.{name}" if path else name
    try:
        setattr(target, name, value)
    except UnicodeEncodeError:
        raise bounds.UTF8.refused(where) from None
    except TypeError:
        expected = _EXPECTED.get(target.DESCRIPTOR.fields_by_name[name].type, "a whole number")
        raise bounds.TYPE.refused(where, expected=expected) from None
    except ValueError:
        row = bounds.BOUNDS.get(name.upper())
        if isinstance(row, Range):
            row.check(value)
        raise InvalidArgument(where, f"is out of range: {shown(value)}") from None


def _extend(target: Any, name: str, value: Any) -> None:
    try:
        target.extend(value)
    except (TypeError, ValueError):
        raise bounds.TYPE.refused(name, expected="a list of token ids") from None


def _fill(target: Any, name: str, value: Any) -> None:
    try:
        target.update(value)
    except (TypeError, ValueError, AttributeError):
        raise bounds.TYPE.refused(name, expected="a mapping of the right types") from None


def _message(message: Message, path: str) -> router_pb2.Message:
    if not isinstance(message, Mapping):
        raise bounds.TYPE.refused(path, expected="an object")
    out = router_pb2.Message(role=_role(message.get("role"), f"{path}.role"))
    _add_content(out, message.get("content"), f"{path}.content")
    for name in MESSAGE_TEXTS:
        if message.get(name) is not None:
            _set(out, name, message[name], path)
    for name in PARTIAL_FLAGS:
        if message.get(name):
            out.partial = _flag(message[name], f"{path}.{name}")
    for index, call in enumerate(message.get("tool_calls") or ()):
        _add_tool_call(out, call, f"{path}.tool_calls[{index}]")
    return out


def _flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise bounds.TYPE.refused(path, expected="true or false")
    return value


def _role(role: Any, path: str) -> router_pb2.MessageRole.ValueType:
    if role is None:
        return router_pb2.MESSAGE_ROLE_UNSPECIFIED
    if not isinstance(role, str):
        raise bounds.TYPE.refused(path, expected="a string")
    if role not in MESSAGE_ROLES.values:
        raise bounds.ROLE.refused(path)
    return MESSAGE_ROLES.value(role)


def _add_content(message: router_pb2.Message, content: Any, path: str) -> None:
    """Append `content`, a string or a list of text parts."""
    if content is None:
        return
    if isinstance(content, str):
        _set_text(message.content.add(), content, path)
        return
    if not isinstance(content, Sequence):
        raise bounds.TYPE.refused(path, expected="a string or a list of parts")
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise InvalidArgument(f"{path}[{index}].type", "must be text: other parts are not supported")
        _set_text(message.content.add(), part.get("text"), f"{path}[{index}].text")


def _set_text(part: router_pb2.ContentPart, text: Any, path: str) -> None:
    if text is None:
        raise bounds.TYPE.refused(path, expected="a string")
    try:
        part.text = text
    except UnicodeEncodeError:
        raise bounds.UTF8.refused(path) from None
    except TypeError:
        raise bounds.TYPE.refused(path, expected="a string") from None


def _add_tool_call(message: router_pb2.Message, call: Any, path: str) -> None:
    called, inside, name_of_arguments = _called(call, path)
    added = message.tool_calls.add()
    _set(added, "id", call.get("id") or "", path)
    _set(added, "name", called.get("name") or "", inside)
    arguments = called.get(name_of_arguments) or ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    _set(added, "arguments", text, inside)


def _called(call: Any, path: str) -> tuple[Mapping[str, Any], str, str]:
    """The object with the name of a call, its path, and the key of its arguments; forms as over HTTP."""
    if not isinstance(call, Mapping):
        raise bounds.TYPE.refused(f"{path}.function", expected="an object")
    custom, function = call.get("custom"), call.get("function")
    if custom is not None:
        if not isinstance(custom, Mapping):
            raise bounds.TYPE.refused(f"{path}.custom", expected="an object")
        return custom, f"{path}.custom", "input"
    if call.get("type") not in (None, "", "function"):
        raise InvalidArgument(f"{path}.type", "must be function")
    if function is None:
        return call, f"{path}.function", "arguments"  # a call may have its name at the top
    if not isinstance(function, Mapping):
        raise bounds.TYPE.refused(f"{path}.function", expected="an object")
    return function, f"{path}.function", "arguments"


def _tool(tool: Tool, path: str) -> router_pb2.Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidArgument(f"{path}.type", "must be function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bounds.TYPE.refused(f"{path}.function", expected="an object")
    out = router_pb2.Tool()
    for name in ("name", "description"):
        _set(out, name, function.get(name) or "", f"{path}.function")
    if function.get("parameters") is not None:
        try:
            out.parameters = json.dumps(function["parameters"])
        except (TypeError, ValueError, RecursionError):
            raise bounds.TOOL_JSON.refused(f"{path}.function.parameters") from None
    _set(out, "strict", bool(function.get("strict")), f"{path}.function")
    return out


def _tool_choice(choice: str | Mapping[str, Any]) -> router_pb2.ToolChoice:
    if isinstance(choice, str):
        if choice not in TOOL_CHOICE_MODES.values or choice == "function":
            raise bounds.TOOL_CHOICE.refused()
        return router_pb2.ToolChoice(mode=TOOL_CHOICE_MODES.value(choice))
    if isinstance(choice, Mapping) and isinstance(choice.get("allowed_tools"), Mapping):
        return _allowed_tools(choice["allowed_tools"])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bounds.TOOL_CHOICE.refused()
    return router_pb2.ToolChoice(mode=router_pb2.TOOL_CHOICE_MODE_FUNCTION, function=name)


def _allowed_tools(allowed: Mapping[str, Any]) -> router_pb2.ToolChoice:
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not tools:
        raise bounds.TOOL_CHOICE.refused()
    names = [tool.get("function", tool).get("name") for tool in tools if isinstance(tool, Mapping)]
    made = router_pb2.ToolChoice(mode=TOOL_CHOICE_MODES.value(mode))
    _fill_texts(made.allowed, names, "tool_choice.allowed_tools.tools")
    return made
