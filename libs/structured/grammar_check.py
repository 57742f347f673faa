"""Makes and checks a client's grammar: it compiles, allows something, and has quick masks. Pure but for time.

A schema of a few bytes may take llguidance minutes, in a call that nothing interrupts. So the check runs in a
process that may be killed (check_process.py).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher
from msgspec.structs import replace

from libs.structured.answer_grammar import OutputFormat, answer_grammar
from libs.structured.forced_text import FORCED_REASON, forces_much
from libs.structured.grammar_cache import (
    ALONE_LIMITS,
    MAX_CLIENT_SYMBOLS,
    compile_grammar,
    first_lines,
)
from libs.structured.schema.json_schema import find_unsupported
from libs.structured.schema.unsupported_parts import find_unsupported_part, locate
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary
from slipstream.errors import InvalidArgument

# CPU time of one mask, beyond which a grammar would slow down the steps of all sequences on its worker.
MAX_MASK_S = 0.1
_TRIAL_TOKENS = 32
# Strings, comments and regular expressions of Lark, in which special tokens have no meaning.
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/')
_FORBIDDEN_IN_LARK = re.compile(r"<|@|%llguidance")


class CheckRequest(msgspec.Struct, frozen=True):
    """What a client states about an answer, and the CPU time to check it. At least one part has a schema.

    Without `has_text` the answer has calls alone; its output is checked, too.
    """

    output: OutputFormat | None = None
    tools: Sequence[CallableTool] = ()
    has_text: bool = True
    parallel: bool = True
    limit_cpu_s: float = 0.0  # 0: none

    def parts(self) -> list[OutputFormat]:
        """What the grammar is made of, each with its field."""
        of_tools = [
            OutputFormat("json_schema", tool.parameters, tool.field)
            for tool in self.tools
            if tool.parameters is not None
        ]
        return [self.output, *of_tools] if self.output is not None else of_tools


class Checked(msgspec.Struct, frozen=True):
    """The grammar of a good request, or why it is refused."""

    grammar: str = ""
    field: str = ""
    reason: str = ""


def check_grammar(
    request: CheckRequest, vocabulary: GrammarVocabulary, *, before_mask: Callable[[], None] = lambda: None
) -> Checked:
    """The grammar of a whole answer, or its first defect with the field of the part that has it.

    `before_mask` is called before each mask, which may take long.
    """
    parts = request.parts()
    field = parts[0].field
    try:
        for part in parts:  # first, because a part with such a defect may take long to make a grammar of
            _check_part(part, vocabulary)
        output = request.output if request.has_text else None
        grammar = answer_grammar(output, request.tools, vocabulary.special_ids, parallel=request.parallel)
        try:
            matcher = compile_grammar(grammar, vocabulary, field=field)
        except InvalidArgument:
            for part in parts:
                _name_defect(part, vocabulary)
            raise
        _check_warnings(matcher, field)
        _try_masks(matcher, vocabulary, field, before_mask)
    except InvalidArgument as error:
        return Checked(field=error.field, reason=error.reason)
    except RecursionError:
        return Checked(field=field, reason="is nested too deep")
    return Checked(grammar)


def _check_part(part: OutputFormat, vocabulary: GrammarVocabulary) -> None:
    """Refuse what llguidance would take, and not hold, or mask too slowly."""
    if part.kind == "json_schema" and (found := find_unsupported_part(part.content)) is not None:
        raise InvalidArgument(".".join(filter(None, (part.field, found[0]))), found[1])
    if part.kind == "lark" and (used := _FORBIDDEN_IN_LARK.search(_LITERALS.sub("", part.content))):
        raise InvalidArgument(part.field, f"may not use {used.group()}: it holds text, not control tokens")
    if any(map(forces_much, _regexes(part))):
        raise InvalidArgument(part.field, FORCED_REASON)
    if part.kind == "lark":
        _check_size(part, vocabulary)


def _regexes(part: OutputFormat) -> Iterable[str]:
    """The regular expressions of a part that is no schema."""
    if part.kind == "regex":
        return [part.content]
    if part.kind == "lark":
        return [found["regex"] or "" for found in _LITERALS.finditer(part.content)]
    return ()


def _check_size(part: OutputFormat, vocabulary: GrammarVocabulary) -> None:
    try:
        compile_grammar(answer_grammar(part, (), {}), vocabulary, limits=ALONE_LIMITS)
    except InvalidArgument as error:
        if "grammar size" in error.reason:
            reason = f"is too complex: its rules have more than {MAX_CLIENT_SYMBOLS} symbols"
            raise InvalidArgument(part.field, reason) from None


def _name_defect(part: OutputFormat, vocabulary: GrammarVocabulary) -> None:
    """Raise the error of a part that does not compile alone, naming the keyword where there is one."""

    def compile_alone(content: Any) -> str:
        try:
            compile_grammar(answer_grammar(replace(part, content=content), (), {}), vocabulary)
        except InvalidArgument as error:
            return error.reason
        return ""

    reason = compile_alone(part.content)
    if not reason:
        return
    if part.kind == "json_schema":
        if (found := find_unsupported(part.content)) is not None:
            raise InvalidArgument(f"{part.field}.{found[0]}", found[1])
        path = locate(part.content, reason, compile_alone)
        raise InvalidArgument(".".join(filter(None, (part.field, path))), reason)
    raise InvalidArgument(part.field, reason)


def _check_warnings(matcher: LLMatcher, field: str) -> None:
    for warning in matcher.get_grammar_warnings():
        raise InvalidArgument(field, f"cannot be held: {warning}")


def _try_masks(
    matcher: LLMatcher, vocabulary: GrammarVocabulary, field: str, before_mask: Callable[[], None]
) -> None:
    """Walk some tokens into the grammar by chance, and measure the masks."""
    matcher, chance = matcher.deep_copy(), random.Random(0)
    for step in range(_TRIAL_TOKENS):
        before_mask()
        began_s = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise InvalidArgument(field, f"cannot be held: {first_lines(matcher.get_error())}")
        if time.thread_time() - began_s > MAX_MASK_S:
            raise InvalidArgument(field, "is too complex: one token takes too long")
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        going_on = [token for token in _some(allowed, chance) if token not in vocabulary.end_ids]
        if not len(allowed):
            raise InvalidArgument(field, "allows no text" if not step else "leads to a text without an end")
        if not going_on or not matcher.consume_token(going_on[0]):
            return


def _some(allowed: Any, chance: random.Random) -> list[int]:
    return [int(allowed[chance.randrange(len(allowed))]) for _ in range(8)] if len(allowed) else []
