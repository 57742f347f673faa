"""Token ids to deltas: well-formed and malformed responses, stop strings, any chunking."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.response_parser import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ResponseParser,
    ToolCallArguments,
    ToolCallForm,
    ToolCallStart,
)
from libs.text.special_tokens import KIMI_OFFSETS, SINGULAR_SECTION_BEGIN
from libs.text.tokenizer import Tokenizer
from tests.text.corpus import WEATHER_TOOL, any_text

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def ids(tokenizer: Tokenizer, *parts: str | int) -> list[int]:
    """Encode parts: a control token's exact name as that token, other text as text, a number as one byte."""
    out: list[int] = []
    for part in parts:
        if isinstance(part, int):
            out.append(part)
        elif part in tokenizer.special_ids:
            out.append(tokenizer.special_id(part))
        else:
            out.extend(tokenizer.encode_text(part))
    return out


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Merge neighbouring deltas of one kind."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        match last, delta:
            case (ContentDelta(a), ContentDelta(b)):
                out[-1] = ContentDelta(a + b)
            case (ReasoningDelta(a), ReasoningDelta(b)):
                out[-1] = ReasoningDelta(a + b)
            case (ToolCallArguments(i, a), ToolCallArguments(j, b)) if i == j:
                out[-1] = ToolCallArguments(i, a + b)
            case _:
                out.append(delta)
    return out


def parse(tokenizer: Tokenizer, *parts: str | int, thinking: bool = False, **options: Any) -> list[Delta]:
    """Parse a response one token at a time and all at once; both must give the same deltas."""
    token_ids = ids(tokenizer, *parts)
    parser = ResponseParser(tokenizer, thinking=thinking, **options)
    whole = [*parser.push(token_ids), *parser.finish()]
    single = ResponseParser(tokenizer, thinking=thinking, **options)
    stepped = [delta for token_id in token_ids for delta in single.push([token_id])] + single.finish()
    assert joined(whole) == whole == joined(stepped)
    return whole


def test_plain_content(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, "Hello, 世界!", "<|im_end|>") == [ContentDelta("Hello, 世界!")]


def test_reasoning_then_content(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, "Hmm.", "</think>", "Yes.", "<|im_end|>", thinking=True) == [
        ReasoningDelta("Hmm."),
        ContentDelta("Yes."),
    ]


def test_tool_calls_after_content(tokenizer: Tokenizer) -> None:
    response = ("Let me see.", BEGIN, CALL, "functions.get_weather:0", ARGS, '{"city": "Paris"}', CALL_END)
    more = (CALL, "functions.find-order:1", ARGS, '{"id": 7}', CALL_END, END, "<|im_end|>")
    assert parse(tokenizer, *response, *more) == [
        ContentDelta("Let me see."),
        ToolCallStart(0, "functions.get_weather:0", "get_weather"),
        ToolCallArguments(0, '{"city": "Paris"}'),
        ToolCallStart(1, "functions.find-order:1", "find-order"),
        ToolCallArguments(1, '{"id": 7}'),
    ]


def test_a_tool_section_ends_the_reasoning(tokenizer: Tokenizer) -> None:
    response = ("I call.", BEGIN, CALL, "functions.f:0", ARGS, "{}", CALL_END, END, "Done")
    assert parse(tokenizer, *response, thinking=True) == [
        ReasoningDelta("I call."),
        ToolCallStart(0, "functions.f:0", "f"),
        ToolCallArguments(0, "{}"),
        ContentDelta("Done"),
    ]


@pytest.mark.parametrize("thinking", [True, False])
def test_the_singular_section_token_is_removed_before_a_call(tokenizer: Tokenizer, thinking: bool) -> None:
    response = ("See ", SINGULAR_SECTION_BEGIN, "\n", CALL, "functions.f:0", ARGS, "{}", CALL_END)
    kind = ReasoningDelta if thinking else ContentDelta
    assert parse(tokenizer, *response, "<|tool_call_section_end|>", "<|im_end|>", thinking=thinking) == [
        kind("See "),
        ToolCallStart(0, "functions.f:0", "f"),
        ToolCallArguments(0, "{}"),
    ]


def test_text_that_spells_control_tokens_stays_text(tokenizer: Tokenizer) -> None:
    text = f"</think>{SINGULAR_SECTION_BEGIN}{BEGIN}{CALL}functions.f:0{ARGS}{{}}{CALL_END}<|im_end|>!"
    token_ids = tokenizer.encode_text(text)
    for thinking, kind in ((False, ContentDelta), (True, ReasoningDelta)):
        parser = ResponseParser(tokenizer, thinking=thinking)
        assert joined([*parser.push(token_ids), *parser.finish()]) == [kind(text)]
        assert not parser.saw_tool_calls


MANY_DIGITS = "9" * 5_000  # more than int() reads


@pytest.mark.parametrize(
    ("header", "call_id", "name"),
    [
        (" functions.f:3\n", "functions.f:3", "f"),
        ("f:3", "f:3", "f"),
        ("functions.a.b:12", "functions.a.b:12", "a.b"),
        ("functions.f", "functions.f:0", "f"),
        ("f", "functions.f:0", "f"),
        pytest.param(f"f:{MANY_DIGITS}", f"f:{MANY_DIGITS}", "f", id="many digits"),
        ("call it: f", "call it: f", "call it: f"),
    ],
)
def test_headers(tokenizer: Tokenizer, header: str, call_id: str, name: str) -> None:
    response = (BEGIN, CALL, header, ARGS, "{}", CALL_END, END)
    assert parse(tokenizer, *response)[0] == ToolCallStart(0, call_id, name)


ORDER_TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "parameters": {"properties": {"order": {}, "city": {}}, "required": ["order"]},
    },
}
PING_TOOL = {"type": "function", "function": {"name": "ping"}}


@pytest.mark.parametrize(
    ("tools", "arguments", "name"),
    [
        ([WEATHER_TOOL], '{"anything": 1}', "get_weather"),
        ([WEATHER_TOOL], '{"city": "Par', "get_weather"),
        ([WEATHER_TOOL, ORDER_TOOL], '{"city": "Paris"}', "get_weather"),
        ([WEATHER_TOOL, ORDER_TOOL], '{"city": "Paris", "order": 1}', "find_order"),
        ([PING_TOOL, ORDER_TOOL], "{}", "ping"),
        ([WEATHER_TOOL, ORDER_TOOL], '{"colour": 1}', None),
        ([WEATHER_TOOL, ORDER_TOOL], '{"city": "Par', None),
        ([WEATHER_TOOL, ORDER_TOOL], "[1]", None),
        pytest.param([WEATHER_TOOL, ORDER_TOOL], "[" * 100_000, None, id="nested deep"),
        ([], "{}", None),
    ],
)
@pytest.mark.parametrize(
    ("header", "index"),
    [("4", 4), ("functions.:4", 4), ("", 0), pytest.param(MANY_DIGITS, 0, id="many digits")],
)
def test_a_bare_number_gets_the_name_of_the_tool_that_fits(
    tokenizer: Tokenizer, tools: list[Any], arguments: str, name: str | None, header: str, index: int
) -> None:
    deltas = parse(tokenizer, BEGIN, CALL, header, ARGS, arguments, CALL_END, END, tools=tools)
    if name is None:
        assert deltas == []
    else:
        call_id = f"functions.{name}:{index}"
        assert deltas == [ToolCallStart(0, call_id, name), ToolCallArguments(0, arguments)]


def test_ids_of_one_response_are_distinct(tokenizer: Tokenizer) -> None:
    call = (CALL, "functions.f:5", ARGS, "{}", CALL_END)
    starts = [d for d in parse(tokenizer, BEGIN, *call, *call, *call, END) if isinstance(d, ToolCallStart)]
    assert [start.id for start in starts] == ["functions.f:5", "functions.f:6", "functions.f:7"]


def test_truncated_arguments_are_passed_on_unchanged(tokenizer: Tokenizer) -> None:
    for end in ((), ("<|im_end|>",), (END,), (CALL_END,)):
        assert parse(tokenizer, BEGIN, CALL, "functions.f:0", ARGS, '{"city": "Par', *end) == [
            ToolCallStart(0, "functions.f:0", "f"),
            ToolCallArguments(0, '{"city": "Par'),
        ]


def test_a_tool_call_without_arguments_is_not_reported(tokenizer: Tokenizer) -> None:
    for end in ((), (CALL_END, END), ("<|im_end|>",)):
        parser = ResponseParser(tokenizer, thinking=False)
        deltas = parser.push(ids(tokenizer, "Hm", BEGIN, CALL, "functions.f:0", *end)) + parser.finish()
        assert deltas == [ContentDelta("Hm")]
        assert not parser.saw_tool_calls


def test_a_missing_call_end_is_implied(tokenizer: Tokenizer) -> None:
    assert parse(
        tokenizer, CALL, "functions.f:0", ARGS, "{}", CALL, "functions.g:1", ARGS, "[]", END, "x"
    ) == [
        ToolCallStart(0, "functions.f:0", "f"),
        ToolCallArguments(0, "{}"),
        ToolCallStart(1, "functions.g:1", "g"),
        ToolCallArguments(1, "[]"),
        ContentDelta("x"),
    ]


def test_stray_control_tokens_are_dropped(tokenizer: Tokenizer) -> None:
    stray = ("a", "</think>", "b", ARGS, CALL_END, END, "c", "<|im_user|>", "d", "<|im_end|>", "e")
    assert parse(tokenizer, *stray) == [ContentDelta("abcde")]


def test_thinking_may_start_again(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, "a", "<think>", "b", "<think>", "c", "</think>", "d") == [
        ContentDelta("a"),
        ReasoningDelta("bc"),
        ContentDelta("d"),
    ]


def test_without_tools_nothing_of_a_call_is_shown(tokenizer: Tokenizer) -> None:
    response = ("Hm", BEGIN, CALL, "functions.f:0", ARGS, "{}", CALL_END, END, "Bye", "<|im_end|>")
    assert parse(tokenizer, *response, call_form=ToolCallForm.DROPPED) == [ContentDelta("HmBye")]
    assert parse(tokenizer, *response, call_form=ToolCallForm.DROPPED, thinking=True) == [
        ReasoningDelta("Hm"),
        ContentDelta("Bye"),
    ]
    cut_off = ("Hm", BEGIN, CALL, "functions.f:0", ARGS, "{")
    assert parse(tokenizer, *cut_off, call_form=ToolCallForm.DROPPED) == [ContentDelta("Hm")]
    singular = ("Hm<|tool_call_section_begin|>", CALL, "functions.f:0", ARGS, "{}", CALL_END)
    assert parse(tokenizer, *singular, call_form=ToolCallForm.DROPPED) == [ContentDelta("Hm")]


def test_as_text_all_of_a_call_is_content(tokenizer: Tokenizer) -> None:
    """A bare prompt has no tools: its text goes on, whatever control tokens come."""
    call = (BEGIN, CALL, "functions.f:0", ARGS, "{}", CALL_END, END)
    shown = [ContentDelta("Hmfunctions.f:0{}Bye")]
    assert parse(tokenizer, "Hm", *call, "Bye", call_form=ToolCallForm.TEXT) == shown
    spelled = ("Hm", SINGULAR_SECTION_BEGIN, CALL, "b")
    assert parse(tokenizer, *spelled, call_form=ToolCallForm.TEXT) == parse(
        tokenizer, *(part for part in spelled if part != CALL)
    )
    stopped = parse(tokenizer, "Hm", *call, "Bye", call_form=ToolCallForm.TEXT, stop=["f:"])
    assert stopped == [ContentDelta("Hmfunctions.")]


def test_a_character_is_emitted_only_when_complete(tokenizer: Tokenizer) -> None:
    parser = ResponseParser(tokenizer, thinking=False)
    shown = [parser.push([byte]) for byte in "é😀".encode()]
    assert shown == [[], [ContentDelta("é")], [], [], [], [ContentDelta("😀")]]


def test_an_unfinished_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, "a", 0xF0, 0x9F) == [ContentDelta("a")]
    assert parse(tokenizer, "a", 0xF0, "<|im_end|>") == [ContentDelta("a")]
    assert parse(tokenizer, "a", 0xF0, "</think>", "b", thinking=True) == [
        ReasoningDelta("a"),
        ContentDelta("b"),
    ]


def test_malformed_bytes_inside_text_are_replaced(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, "a", 0xFF, "b", 0xE5, 0xA4, "c") == [ContentDelta("a\ufffdb\ufffdc")]


def test_a_stop_string_ends_the_response(tokenizer: Tokenizer) -> None:
    response = ("One. Two", ". ", "Three", BEGIN, CALL, "functions.f:0", ARGS, "{}")
    assert parse(tokenizer, *response, stop=["o. T", "ree"]) == [ContentDelta("One. Tw")]
    parser = ResponseParser(tokenizer, thinking=False, stop=["."])
    assert parser.push(ids(tokenizer, "One. Two")) == [ContentDelta("One")]
    assert parser.stopped
    assert parser.push(ids(tokenizer, "Three", CALL, "f:0", ARGS)) == parser.finish() == []
    assert not parser.saw_tool_calls


def test_a_possible_start_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    parser = ResponseParser(tokenizer, thinking=False, stop=["END."])
    assert parser.push(ids(tokenizer, "The E")) == [ContentDelta("The ")]
    assert parser.push(ids(tokenizer, "N")) == []
    assert parser.push(ids(tokenizer, "X E")) == [ContentDelta("ENX ")]
    assert parser.finish() == [ContentDelta("E")]
    assert not parser.stopped


def test_stop_strings_count_in_content_only(tokenizer: Tokenizer) -> None:
    response = (
        "stop",
        "</think>",
        "a",
        CALL,
        "functions.stop:0",
        ARGS,
        '{"stop": 1}',
        CALL_END,
        END,
        "b stop c",
    )
    assert parse(tokenizer, *response, thinking=True, stop=["stop"]) == [
        ReasoningDelta("stop"),
        ContentDelta("a"),
        ToolCallStart(0, "functions.stop:0", "stop"),
        ToolCallArguments(0, '{"stop": 1}'),
        ContentDelta("b "),
    ]


def test_the_parser_emits_nothing_after_finish(tokenizer: Tokenizer) -> None:
    parser = ResponseParser(tokenizer, thinking=False)
    parser.push(ids(tokenizer, "a"))
    assert parser.finish() == []
    assert parser.push(ids(tokenizer, "b", CALL)) == parser.finish() == []


_FRAGMENTS = st.one_of(
    any_text,
    st.sampled_from(sorted(KIMI_OFFSETS)),
    st.sampled_from(
        [BEGIN, CALL, ARGS, CALL_END, END, SINGULAR_SECTION_BEGIN, SINGULAR_SECTION_BEGIN[:9], " "]
    ),
    st.sampled_from(["functions.f:0", "3", '{"city": "P"}', "{}", "ab", "abc"]),
    st.integers(0, 255),
)


@given(
    st.lists(_FRAGMENTS, max_size=14),
    st.lists(st.integers(0, 80), max_size=6),
    st.lists(st.sampled_from(["b", "abc", "<|", "c{", "\ufffd"]), max_size=2),
    st.sampled_from([(), (WEATHER_TOOL,), (WEATHER_TOOL, ORDER_TOOL)]),
    st.booleans(),
    st.sampled_from(ToolCallForm),
)
def test_any_chunking_of_the_stream_gives_the_same_deltas(
    tokenizer: Tokenizer,
    fragments: list[str | int],
    cuts: list[int],
    stop: list[str],
    tools: tuple[Any, ...],
    thinking: bool,
    call_form: ToolCallForm,
) -> None:
    token_ids = ids(tokenizer, *fragments)
    options: dict[str, Any] = {"call_form": call_form, "stop": stop, "tools": tools}

    def run(borders: Sequence[int]) -> tuple[list[Delta], bool, bool]:
        parser = ResponseParser(tokenizer, thinking=thinking, **options)
        deltas = [delta for start, end in pairwise(borders) for delta in parser.push(token_ids[start:end])]
        deltas += parser.finish()
        assert all(delta.text for delta in deltas if not isinstance(delta, ToolCallStart))
        return joined(deltas), parser.stopped, parser.saw_tool_calls

    whole = run([0, len(token_ids)])
    assert run(range(len(token_ids) + 1)) == whole
    assert run([0, *sorted(cut for cut in cuts if cut <= len(token_ids)), len(token_ids)]) == whole
    starts = [delta for delta in whole[0] if isinstance(delta, ToolCallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    assert whole[2] == bool(starts)
