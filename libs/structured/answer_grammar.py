"""The grammar of a whole answer: a text of some form, tool calls, or either. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher

from libs.structured.schema.json_schema import json_grammar
from libs.structured.tool_grammar import ANY_OBJECT, CallableTool, calls_rules

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
    if not tools:
        assert output is not None
        return _packed([_text_grammar(output)])
    calls = calls_rules(tools, special_ids, parallel=parallel)
    if output is None:
        return _packed([{"lark_grammar": f"start: calls\n{calls}"}])
    return _packed(
        [
            {"lark_grammar": f"start: @answer | calls\n{calls}"},
            {"name": "answer", **_text_grammar(output)},
        ]
    )


def _packed(grammars: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"grammars": grammars})


def _text_grammar(output: OutputFormat) -> Mapping[str, Any]:
    match output.kind:
        case "json_object":
            return json_grammar(ANY_OBJECT)
        case "json_schema":
            return json_grammar(output.content)
        case "regex":
            made = json.loads(LLMatcher.grammar_from_regex(output.content))
            return {"lark_grammar": made["grammars"][0]["lark_grammar"]}
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(json.dumps(item) for item in output.content)}
        case "lark":
            return {"lark_grammar": output.content}
