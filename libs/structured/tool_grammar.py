"""The grammar of an answer's tool calls, in Kimi's format. Pure.

<|tool_calls_section_begin|> <|tool_call_begin|> functions.NAME:INDEX <|tool_call_argument_begin|> {...}
<|tool_call_end|> ... <|tool_calls_section_end|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libs.structured.schema.json_schema import json_grammar
from libs.text.special_tokens import (
    TOOL_CALL_ARGUMENT_BEGIN,
    TOOL_CALL_BEGIN,
    TOOL_CALL_END,
    TOOL_CALLS_SECTION_BEGIN,
    TOOL_CALLS_SECTION_END,
)

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class CallableTool(msgspec.Struct, frozen=True):
    """A tool that the answer may call. Its arguments are valid under `parameters`; None: any object.

    `field` is the path of the parameters in the client's request.
    """

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    field: str = "tools"


def calls_rules(
    tools: Sequence[CallableTool], special_ids: Mapping[str, int], *, parallel: bool
) -> tuple[str, dict[str, int]]:
    """Rules of Lark for `calls`: one call of these tools, or several when they may be parallel.

    Also how many keys an object has to have that repeats one, by the names of tools that have such objects.
    """

    def token(name: str) -> str:
        return f"<[{special_ids[name]}]>"

    open_names = [tool.name for tool in tools if tool.parameters is None]
    kinds: list[tuple[Sequence[str], Mapping[str, Any] | bool]] = (
        [(open_names, ANY_OBJECT)] if open_names else []
    )
    kinds += [((tool.name,), tool.parameters) for tool in tools if tool.parameters is not None]
    lines = [
        f"calls: {token(TOOL_CALLS_SECTION_BEGIN)}? call{'+' if parallel else ''} "
        f"{token(TOOL_CALLS_SECTION_END)}?",
        f"call: {token(TOOL_CALL_BEGIN)} ( {' | '.join(f'call_{i}' for i in range(len(kinds)))} ) "
        f"{token(TOOL_CALL_END)}",
        "CALL_INDEX: /0|[1-9][0-9]{0,3}/",
    ]
    n_distinct: dict[str, int] = {}
    for i, (names, parameters) in enumerate(kinds):
        grammar = json_grammar(parameters)
        if grammar.n_distinct:
            n_distinct.update(dict.fromkeys(names, grammar.n_distinct))
        spelled = " | ".join(json.dumps(f"functions.{name}:") for name in names)
        lines.append(
            f"call_{i}: ( {spelled} ) CALL_INDEX {token(TOOL_CALL_ARGUMENT_BEGIN)} arguments_{i}\n"
            f"arguments_{i}: %json {json.dumps(grammar.json_schema)}"
        )
    return "\n".join(lines) + "\n", n_distinct
