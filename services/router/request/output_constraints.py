"""The constraints of answers: made from the request, and checked to compile.

Names of tools are always held: a call of a function that is not declared cannot happen. The arguments of
strict tools, and of tools that must be called, are held to their parameters; others to a JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libs.structured.answer_grammar import OutputFormat, answer_grammar
from libs.structured.grammar_check import CheckRequest
from libs.structured.tool_grammar import CallableTool
from libs.text.digest_cache import DigestCache, digest_of
from services.router.request.grammar_checker import GrammarChecker
from services.router.request.model_card import ModelCard
from services.router.request.prompt import thinks
from services.router.request.types import ChatInput, GenerationRequest
from slipstream.sampling import OutputConstraint

_CACHE_BYTES = 16 << 20


class OutputConstraints:
    """Makes the constraints of a router's requests. One thread calls it, and the loop for known ones."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._checker = GrammarChecker(card.model_dir)
        # Grammars that compile, by the digest of the part of a request that they come from.
        self._checked: DigestCache[str] = DigestCache(max_bytes=_CACHE_BYTES)

    def is_known(self, request: GenerationRequest) -> bool:
        """Whether `make` takes no time worth a thread."""
        return not _is_compiled(request) or self._checked.get(_digest(request)) is not None

    def close(self) -> None:
        """End the process that checks grammars."""
        self._checker.close()

    def make(self, request: GenerationRequest) -> OutputConstraint | None:
        """The constraint of a valid request. Raises InvalidArgument naming what no grammar can hold."""
        tools = _callable_tools(request)
        if request.output is None and not tools:
            return None
        chat = request.input
        mode = _mode(request)
        return OutputConstraint(
            grammar=self._grammar(request, tools),
            awaits_calls=request.output is None and mode == "auto",
            thinking=isinstance(chat, ChatInput) and thinks(chat, self._card),
            field=_field(request.output, tools),
        )

    def _grammar(self, request: GenerationRequest, tools: Sequence[CallableTool]) -> str:
        parallel = _is_parallel(request)
        if not _is_compiled(request):
            return answer_grammar(None, tools, self._card.tokenizer.special_ids, parallel=parallel)
        digest = _digest(request)
        grammar = self._checked.get(digest)
        if grammar is None:
            has_text = _mode(request) in ("none", "auto")
            grammar = self._checker.check(CheckRequest(request.output, tools, has_text, parallel))
            self._checked.keep(digest, grammar, n_bytes=len(grammar))
        return grammar


def _mode(request: GenerationRequest) -> str:
    if not isinstance(request.input, ChatInput) or not request.input.tools:
        return "none"
    return request.input.tool_choice.mode if request.input.tool_choice is not None else "auto"


def _is_parallel(request: GenerationRequest) -> bool:
    return (
        isinstance(request.input, ChatInput)
        and request.input.parallel_tool_calls
        and _mode(request) != "function"
    )


def _callable_tools(request: GenerationRequest) -> list[CallableTool]:
    """The tools that the answer may call."""
    mode = _mode(request)
    if mode == "none":
        return []
    assert isinstance(request.input, ChatInput)
    choice = request.input.tool_choice
    allowed = set(choice.allowed) if choice is not None else set()
    if choice is not None and mode == "function":
        allowed = {choice.function}
    is_held = mode != "auto" or bool(allowed)
    tools = []
    for index, tool in enumerate(request.input.tools):
        function: Mapping[str, Any] = tool["function"]
        if allowed and function["name"] not in allowed:
            continue
        parameters = function.get("parameters")
        # An empty schema, and `true`, hold arguments as all calls do: to an object. `false` is refused.
        if not (is_held or function.get("strict")) or parameters is True or parameters == {}:
            parameters = None
        tools.append(CallableTool(function["name"], parameters, f"tools[{index}].function.parameters"))
    return tools


def _field(output: OutputFormat | None, tools: Sequence[CallableTool]) -> str:
    """The first part of the request that makes the grammar."""
    held = [tool.field for tool in tools if tool.parameters is not None]
    return output.field if output is not None else (held or ["tools"])[0]


def _is_compiled(request: GenerationRequest) -> bool:
    """Whether the client's own schema or grammar is part of the constraint."""
    tools = _callable_tools(request)
    return request.output is not None or any(tool.parameters is not None for tool in tools)


def _digest(request: GenerationRequest) -> bytes | None:
    output = request.output
    return digest_of(
        [
            None if output is None else (output.kind, output.content),
            [(tool.name, tool.parameters) for tool in _callable_tools(request)],
            _mode(request),
            _is_parallel(request),
        ]
    )
