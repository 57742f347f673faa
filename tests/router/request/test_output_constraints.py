"""Constraints of requests: what is held, and how long a check may take."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.structured.answer_grammar import OutputFormat
from libs.structured.grammar_check import CheckRequest
from services.router.request import grammar_checker
from services.router.request.grammar_checker import GrammarChecker
from services.router.request.model_card import ModelCard, load_model_card
from services.router.request.output_constraints import OutputConstraints
from services.router.request.types import ChatInput, GenerationRequest, ToolChoice
from slipstream.errors import InvalidArgument, Unavailable

MODEL_DIR = Path(__file__).parents[3] / "models" / "slipstream-mini"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELD = {"type": "array", "uniqueItems": True}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def chat(*tools: Any, choice: ToolChoice | None = None, **more: Any) -> ChatInput:
    return ChatInput(USER, tools=tools, tool_choice=choice, **more)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return load_model_card(MODEL_DIR)


@pytest.fixture(scope="module")
def constraints(card: ModelCard) -> Iterator[OutputConstraints]:
    made = OutputConstraints(card)
    yield made
    made.close()


def test_a_plain_request_has_no_constraint(constraints: OutputConstraints) -> None:
    request = GenerationRequest(chat())
    assert constraints.is_known(request)
    assert constraints.make(request) is None
    none = GenerationRequest(chat(tool("f"), choice=ToolChoice("none")))
    assert constraints.make(none) is None


def test_names_alone_are_held_without_a_check(constraints: OutputConstraints) -> None:
    request = GenerationRequest(chat(tool("f", HELD), tool("g")))
    assert constraints.is_known(request)
    made = constraints.make(request)
    assert made is not None
    assert made.awaits_calls
    assert "functions.f:" in made.grammar
    assert "uniqueItems" not in made.grammar


def test_strict_and_forced_tools_are_checked_by_their_path(constraints: OutputConstraints) -> None:
    for request in (
        GenerationRequest(chat(tool("f"), tool("g", HELD, strict=True))),
        GenerationRequest(chat(tool("f"), tool("g", HELD), choice=ToolChoice("required"))),
        GenerationRequest(chat(tool("f"), tool("g", HELD), choice=ToolChoice("function", "g"))),
        GenerationRequest(chat(tool("f"), tool("g", HELD), choice=ToolChoice("auto", allowed=("g",)))),
    ):
        assert not constraints.is_known(request)
        with pytest.raises(InvalidArgument) as refusal:
            constraints.make(request)
        assert refusal.value.field == "tools[1].function.parameters.uniqueItems"
    other = GenerationRequest(chat(tool("f"), tool("g", HELD), choice=ToolChoice("function", "f")))
    assert constraints.make(other) is not None


def test_parameters_that_are_true_or_false(constraints: OutputConstraints) -> None:
    """Only `false` cannot be held: it allows no arguments, and a call has some."""
    for held in ({"strict": True}, {}):
        choice = None if held else ToolChoice("required")
        made = constraints.make(GenerationRequest(chat(tool("f", True, **held), choice=choice)))
        open_one = constraints.make(GenerationRequest(chat(tool("f", **held), choice=choice)))
        assert made == open_one and made is not None
        with pytest.raises(InvalidArgument) as refusal:
            constraints.make(GenerationRequest(chat(tool("g"), tool("f", False, **held), choice=choice)))
        assert refusal.value.field == "tools[1].function.parameters"
    made = constraints.make(GenerationRequest(chat(tool("f", False))))
    assert made == constraints.make(GenerationRequest(chat(tool("f"))))


def test_allowed_tools_are_the_only_names(constraints: OutputConstraints) -> None:
    choice = ToolChoice("auto", allowed=("g",))
    made = constraints.make(GenerationRequest(chat(tool("f"), tool("g"), choice=choice)))
    assert made is not None
    assert "functions.g:" in made.grammar
    assert "functions.f:" not in made.grammar


def test_a_checked_schema_is_known(constraints: OutputConstraints) -> None:
    request = GenerationRequest(chat(), output=OutputFormat("json_schema", {**SCHEMA, "title": "known"}))
    assert not constraints.is_known(request)
    first = constraints.make(request)
    assert constraints.is_known(request)
    assert constraints.make(request) == first


def test_reasoning_comes_before_what_is_held(constraints: OutputConstraints) -> None:
    output = OutputFormat("json_object")
    for thinking in (False, True):
        made = constraints.make(GenerationRequest(chat(thinking=thinking), output=output))
        assert made is not None
        assert made.thinking == thinking
        assert not made.awaits_calls


def test_tools_and_a_form_are_one_grammar(constraints: OutputConstraints) -> None:
    made = constraints.make(GenerationRequest(chat(tool("f")), output=OutputFormat("json_schema", SCHEMA)))
    assert made is not None
    assert [grammar.get("name") for grammar in json.loads(made.grammar)["grammars"]] == [None, "answer"]


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checker, "_BUSY_S", 300.0)  # for half a second of processor time
    checker = GrammarChecker(MODEL_DIR, limit_s=60.0)

    def check(schema: Any) -> None:
        part = OutputFormat("json_schema", schema)
        checker.check(CheckRequest(part))

    try:
        check(SCHEMA)
        checker._limit_s = 0.5
        with pytest.raises(InvalidArgument, match="too complex"):
            check({"type": "integer", "multipleOf": 999_983})
        # It compiles within the time of a start, which is not the limit's.
        with pytest.raises(InvalidArgument, match="too complex"):
            check({"type": "integer", "multipleOf": 399_989})
        checker._limit_s = 60.0
        check(SCHEMA)
    finally:
        checker.close()


def test_a_grammar_with_one_slow_mask_is_refused_within_the_time_of_a_mask() -> None:
    """The whole check has minutes."""
    checker = GrammarChecker(MODEL_DIR, limit_s=600.0)
    try:
        with pytest.raises(InvalidArgument, match="its check takes too much"):
            checker.check(CheckRequest(OutputFormat("choice", ["a" * 3_000_000])))
        assert checker.check(CheckRequest(OutputFormat("regex", "a{1000}")))
    finally:
        checker.close()


def test_a_grammar_that_passes_has_room_on_the_stacks_of_workers() -> None:
    """llguidance recurses along terminals: 2,000 of them pass with 8 MiB of stack, 4,000 end the process."""
    checker = GrammarChecker(MODEL_DIR, limit_s=60.0)

    def check(depth: int) -> str:
        rules = [f'A{i}: A{i + 1} "b"' for i in range(depth)]
        text = "\n".join(["start: A0", *rules, f'A{depth}: "a"', ""])
        return checker.check(CheckRequest(OutputFormat("lark", text)))

    try:
        assert check(100)
        with pytest.raises(InvalidArgument, match="its check takes too much"):
            check(1_000)
        assert check(100)
    finally:
        checker.close()


def test_a_check_amid_the_end_of_the_router_is_no_fault_of_the_grammar() -> None:
    checker = GrammarChecker(MODEL_DIR, limit_s=60.0)
    part = OutputFormat("json_schema", {"type": "integer", "multipleOf": 999_983})
    request = CheckRequest(part)
    with ThreadPoolExecutor(1) as thread:
        checking = thread.submit(checker.check, request)
        while checker._process is None:
            time.sleep(0.01)
        checker.close()
        with pytest.raises(Unavailable):
            checking.result(60)
    with pytest.raises(Unavailable, match="the router ends"):
        checker.check(request)


def test_a_router_without_a_tokenizer_on_disk_says_so(card: ModelCard) -> None:
    lacking = OutputConstraints(replace(card, model_dir=None))
    try:
        with pytest.raises(InvalidArgument, match="response_format"):
            lacking.make(GenerationRequest(chat(), output=OutputFormat("json_object")))
    finally:
        lacking.close()


def test_a_grammar_is_made_where_its_time_is_limited(
    constraints: OutputConstraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def note(*parts: object, **_: object) -> str:
        made.append(parts)
        return ""

    monkeypatch.setattr("services.router.request.output_constraints.answer_grammar", note)
    names: dict[str, Any] = {f"{chr(0x4E00 + i)}": {} for i in range(50)}
    code = {"k": {"const": "\x01"}}
    schema = {"type": "object", "properties": {**names, **code}, "additionalProperties": {"type": "string"}}
    requests = [
        GenerationRequest(chat(tool("f")), output=OutputFormat("json_schema", schema)),
        GenerationRequest(chat(tool("g", schema, strict=True))),
    ]
    for request in requests:
        constraint = constraints.make(request)
        assert constraint is not None
        assert "patternProperties" in constraint.grammar
    assert not made
    long = {**schema, "properties": {"a" * 1200: {}, **code}}
    with pytest.raises(InvalidArgument) as refusal:
        constraints.make(GenerationRequest(chat(), output=OutputFormat("json_schema", long)))
    assert refusal.value.field == "response_format.properties.k.const"


def test_a_form_that_the_answer_cannot_have_is_checked(constraints: OutputConstraints) -> None:
    def request(schema: Any) -> GenerationRequest:
        calls = chat(tool("f"), choice=ToolChoice("required"))
        return GenerationRequest(calls, output=OutputFormat("json_schema", schema))

    with pytest.raises(InvalidArgument) as refusal:
        constraints.make(request({"type": "integer", "divisibleBy": 3}))
    assert refusal.value.field == "response_format.divisibleBy"
    made = constraints.make(request({**SCHEMA, "title": "unused"}))
    assert made is not None
    assert "unused" not in made.grammar


def test_a_constraint_names_the_field_of_its_form(constraints: OutputConstraints) -> None:
    """One grammar may come from several fields."""
    for field in ("guided_regex", "structured_outputs.regex"):
        made = constraints.make(GenerationRequest(chat(), output=OutputFormat("regex", "a|b", field)))
        assert made is not None and made.field == field
    strict = constraints.make(GenerationRequest(chat(tool("f"), tool("g", SCHEMA, strict=True))))
    assert strict is not None and strict.field == "tools[1].function.parameters"
    names = constraints.make(GenerationRequest(chat(tool("f"))))
    assert names is not None and names.field == "tools"
