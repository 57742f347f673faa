"""The grammar of a whole answer: a text of some form, tool calls, or either. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher

from libs.structured.schema.json_schema import json_grammar
from libs.structured.stated_keys import TEXT, with_stated_keys
from libs.structured.tool_grammar import ANY_OBJECT, CallableTool, calls_rules

# The names of the text's part: rules that are made here, and a client's own, which have narrower limits.
_OURS, _CLIENT = "answer", "client_answer"

FormatKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


class OutputFormat(msgspec.Struct, frozen=True, gc=False):
    """The form of an answer's text.

    `content` is a JSON schema, a regular expression, a list of choices or a grammar of Lark. `field` is its
    path in the client's request.
    """

    kind: FormatKind
    content: Any = None
    field: str = "response_format"


def answer_grammar(
    output: OutputFormat | None,
    tools: Sequence[CallableTool],
    special_ids: Mapping[str, int],
    *,
    parallel: bool = True,
) -> str:
    """A grammar in llguidance's JSON form: the text, the tool calls, or one of both."""
    text, n_of_text = _text_grammar(output) if output is not None else ({}, 0)
    n_distinct = {TEXT: n_of_text} if n_of_text else {}
    if not tools:
        assert output is not None
        return with_stated_keys(n_distinct, [text])
    calls, n_of_calls = calls_rules(tools, special_ids, parallel=parallel)
    n_distinct |= n_of_calls
    if output is None:
        return with_stated_keys(n_distinct, [{"lark_grammar": f"start: calls\n{calls}"}])
    rules = {"lark_grammar": f"start: @{text['name']} | calls\n{calls}"}
    return with_stated_keys(n_distinct, [rules, text])


class _Part(msgspec.Struct):
    name: str = ""


class _Parts(msgspec.Struct):
    grammars: list[_Part]


def is_of_client(grammar: str) -> bool:
    """Whether a part of the grammar is a client's own rules. False for one that is malformed."""
    try:
        parts = msgspec.json.decode(grammar, type=_Parts).grammars
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return any(part.name == _CLIENT for part in parts)


def _text_grammar(output: OutputFormat) -> tuple[Mapping[str, Any], int]:
    match output.kind:
        case "json_object" | "json_schema":
            made = json_grammar(ANY_OBJECT if output.kind == "json_object" else output.content)
            return {"name": _OURS, "json_schema": made.json_schema}, made.n_distinct
        case "regex":
            regex = json.loads(LLMatcher.grammar_from_regex(output.content))
            return {"name": _OURS, "lark_grammar": regex["grammars"][0]["lark_grammar"]}, 0
        case "choice":
            rule = "start: " + " | ".join(json.dumps(item) for item in output.content)
            return {"name": _OURS, "lark_grammar": rule}, 0
        case "lark":
            return {"name": _CLIENT, "lark_grammar": output.content}, 0
