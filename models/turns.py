"""Evaluates single assistant turns: the prompt, the correct message, and whether the reply matches it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libs.text.chat_template import encode_chat
from libs.text.response_parser import ContentDelta, ResponseParser, ToolCallArguments, ToolCallStart
from libs.text.tokenizer import Tokenizer
from models.helpdesk.dialogues import Check, Dialogue

Call = tuple[str, Any]
"""Name of a function and its decoded arguments."""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One assistant message to be written: the ids before it, and the correct message."""

    prompt_ids: list[int]
    check: Check
    expected: Mapping[str, Any]

    @property
    def expected_calls(self) -> list[Call]:
        calls = self.expected.get("tool_calls", ())
        return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A model's reply: visible text and calls. Arguments that are not JSON are None."""

    text: str
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class TurnVerdict:
    """The result for one turn. `right`: the expected calls, all values stated, or the expected text."""

    kind: str
    parses: bool
    right: bool
    identical: bool


def dialogue_turns(tokenizer: Tokenizer, dialogue: Dialogue) -> list[AssistantTurn]:
    """Each assistant message of a dialogue as a separate turn, with the correct history before it."""
    turns = []
    for check in dialogue.checks:
        history = dialogue.messages[: check.index]
        encoded = encode_chat(tokenizer, history, dialogue.tools, add_generation_prompt=True)
        turns.append(AssistantTurn(encoded.token_ids, check, dialogue.messages[check.index]))
    return turns


def parse_reply(tokenizer: Tokenizer, token_ids: Sequence[int]) -> ParsedReply:
    """Parse generated ids as the router does."""
    parser = ResponseParser(tokenizer, thinking=False)
    text: list[str] = []
    names: list[str] = []
    arguments: list[str] = []
    for delta in [*parser.push(token_ids), *parser.finish()]:
        if isinstance(delta, ContentDelta):
            text.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            names.append(delta.name)
            arguments.append("")
        elif isinstance(delta, ToolCallArguments):
            arguments[delta.index] += delta.text
    calls = [(name, _decoded(a)) for name, a in zip(names, arguments, strict=True)]
    return ParsedReply("".join(text), calls)


def _decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def judge(turn: AssistantTurn, reply: ParsedReply) -> TurnVerdict:
    """Compare `reply` with the check of `turn`."""
    expected_text = str(turn.expected["content"])
    identical = reply.text == expected_text and reply.calls == turn.expected_calls
    parses = all(isinstance(arguments, dict) for _, arguments in reply.calls)
    if turn.check.kind == "call":
        parses = parses and bool(reply.calls)
        right = reply.calls == turn.expected_calls
    elif turn.check.values:
        right = not reply.calls and all(value in reply.text for value in turn.check.values)
    else:
        right = identical
    return TurnVerdict(turn.check.kind, parses, right, identical)


def share(verdicts: Iterable[TurnVerdict], kind: str, field: str) -> float:
    """The share of the verdicts of `kind` with a true `field`; 0 when there are none."""
    marks = [bool(getattr(v, field)) for v in verdicts if v.kind == kind]
    return sum(marks) / len(marks) if marks else 0.0
