"""The fields of an HTTP body that say what form an answer has: OpenAI's, Workers AI's and vLLM's. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from libs.structured.answer_grammar import OutputFormat
from services.router.api.json_body import Flag, Json, Text
from services.router.request.json_limits import check_structure
from slipstream import bounds

_NAMED = frozenset({"name", "description", "schema", "strict"})


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's field; Workers AI's has the schema itself in `json_schema`, Together's beside json_object."""

    type: Any = None
    json_schema: Any = None
    schema: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field; older clients of vLLM send `guided_json` and so on."""

    json: Any = None
    regex: Text = None
    choice: Any = None
    grammar: Text = None
    json_object: Flag = None

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "structural_tag": (),
        "whitespace_pattern": ("",),
    }


class OutputFields(Protocol):
    """The fields of a body."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Any
    guided_regex: Text
    guided_choice: Any
    guided_grammar: Text


def parse_output(body: OutputFields, ignore: Callable[[str], None]) -> OutputFormat | None:
    """The form that the body asks for; `ignore` gets the paths of fields without effect.

    Raises InvalidArgument naming the field, also when there are two forms.
    """
    found = [*_vllm(body)]
    if body.response_format is not None:
        stated = _response_format(body.response_format, ignore)
        found += [stated] if stated is not None else []
    if len(found) > 1:
        raise bounds.OUTPUT_ONCE.refused(found[1].field, other=found[0].field)
    return found[0] if found else None


def _response_format(given: ResponseFormat, ignore: Callable[[str], None]) -> OutputFormat | None:
    if given.type not in ("text", "json_object", "json_schema"):
        raise bounds.RESPONSE_FORMAT.refused()
    name = _schema_field(given)
    for other in {"schema", "json_schema"} - {name}:
        if getattr(given, other) is not None:
            ignore(f"response_format.{other}")
    if name is None:
        return None if given.type == "text" else OutputFormat("json_object", field="response_format")
    schema, field = getattr(given, name), f"response_format.{name}"
    if given.type == "json_object":
        return OutputFormat("json_schema", _schema(schema, field), field)
    if isinstance(schema, Mapping) and _is_named(schema):
        for extra in schema.keys() - _NAMED:
            ignore(f"{field}.{extra}")
        schema, field = schema.get("schema"), f"{field}.schema"
    return OutputFormat("json_schema", _schema(schema, field), field)


def _schema_field(given: ResponseFormat) -> str | None:
    """The field whose schema holds; None: the type has none."""
    if given.type == "json_schema":
        return "schema" if given.json_schema is None and given.schema is not None else "json_schema"
    return "schema" if given.type == "json_object" and given.schema is not None else None


def _is_named(given: Json) -> bool:
    """Whether this is OpenAI's form, also where the schema is missing; else it is the schema itself."""
    return "schema" in given or "strict" in given or bool(given and given.keys() <= _NAMED)


def _vllm(body: OutputFields) -> list[OutputFormat]:
    found: list[OutputFormat] = []
    given: list[tuple[str, str, Any]] = [
        ("json_schema", "guided_json", body.guided_json),
        ("regex", "guided_regex", body.guided_regex),
        ("choice", "guided_choice", body.guided_choice),
        ("lark", "guided_grammar", body.guided_grammar),
    ]
    if (newer := body.structured_outputs) is not None:
        if newer == StructuredOutputs():
            raise bounds.OUTPUT_NAMED.refused()
        given += [
            ("json_schema", "structured_outputs.json", newer.json),
            ("regex", "structured_outputs.regex", newer.regex),
            ("choice", "structured_outputs.choice", newer.choice),
            ("lark", "structured_outputs.grammar", newer.grammar),
            ("json_object", "structured_outputs.json_object", newer.json_object or None),
        ]
    for kind, field, content in given:
        if content is not None:
            if kind == "json_schema":
                content = _schema(content, field)
            found.append(OutputFormat(kind, content, field))  # type: ignore[arg-type]
    return found


def _schema(given: object, field: str) -> Json | bool:
    """A schema, or one as text, which vLLM takes too."""
    if isinstance(given, str):
        # The body's own check counts a text as one value.
        check_structure([(field, given.encode(errors="surrogatepass"))])
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise bounds.OUTPUT_SCHEMA.refused(field) from None
    if not isinstance(given, (Mapping, bool)):
        raise bounds.OUTPUT_SCHEMA.refused(field)
    return given
