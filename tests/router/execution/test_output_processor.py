"""Tokens to deltas: neither the answer nor a resume depends on the batching of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.response_parser import ResponseParser, ToolCallForm
from services.router.execution.output_processor import OutputProcessor
from services.router.request.model_card import ModelCard
from slipstream.v1 import common_pb2, router_pb2


def whole_answer(card: ModelCard) -> list[int]:
    """Return reasoning, text with characters of several tokens, two tool calls and the end token."""
    encode, special = card.tokenizer.encode_text, card.tokenizer.special_id
    calls: list[int] = []
    for index in range(2):
        calls += [special("<|tool_call_begin|>"), *encode(f"functions.look:{index}")]
        calls += [special("<|tool_call_argument_begin|>"), *encode('{"city": "Ås"}')]
        calls += [special("<|tool_call_end|>")]
    return [
        *encode("Hmm 你好."),
        special("</think>"),
        *encode("On its way 😀."),
        special("<|tool_calls_section_begin|>"),
        *calls,
        special("<|tool_calls_section_end|>"),
        special("<|im_end|>"),
    ]


def make_processor(
    card: ModelCard, *, stop: Sequence[str] = (), resume_after: int = 0, logprobs: bool = False
) -> OutputProcessor:
    parser = ResponseParser(card.tokenizer, thinking=True, stop=stop)
    return OutputProcessor(
        card.tokenizer,
        parser,
        thinking=True,
        stop_token_ids=card.stop_token_ids,
        with_logprobs=logprobs,
        resume_after=resume_after,
    )


def fold(deltas: Sequence[router_pb2.Delta]) -> tuple[str, str, list[Any]]:
    """Return all content that a client gets."""
    calls: list[list[str]] = []
    for delta in deltas:
        for piece in delta.tool_calls:
            if piece.id:
                calls.append([piece.id, piece.name, ""])
            calls[piece.index][2] += piece.arguments
    return "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls


def run(output: OutputProcessor, tokens: Sequence[int], cuts: Sequence[int]) -> list[router_pb2.Delta]:
    deltas: list[router_pb2.Delta] = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        deltas += [event.delta for event in output.push(tokens[start:end])]
    return [*deltas, *(event.delta for event in output.finish())]


@given(st.randoms(use_true_random=False), st.sampled_from([(), ("way",), ("zzz", "s w")]))
def test_any_batching_gives_the_same_answer_and_token_count(
    card: ModelCard, source: random.Random, stop: tuple[str, ...]
) -> None:
    tokens = whole_answer(card)
    reference = make_processor(card, stop=stop)
    expected = fold(run(reference, tokens, range(1, len(tokens))))
    cuts = sorted(source.sample(range(1, len(tokens)), source.randrange(len(tokens) - 1)))
    output = make_processor(card, stop=stop)
    assert fold(run(output, tokens, cuts)) == expected
    assert output.tokens == reference.tokens
    assert output.reasoning_tokens == reference.reasoning_tokens


@given(
    text=st.text(st.sampled_from("ab é本🎉\u200d"), max_size=8),
    names=st.lists(st.sampled_from(["<|im_middle|>", "<think>", "</think>", "[EOT]"]), max_size=3),
    data=st.data(),
)
def test_the_offset_of_a_token_is_that_of_the_character_which_it_begins_or_continues(
    card: ModelCard, text: str, names: list[str], data: st.DataObject
) -> None:
    """Control tokens between characters have no text; those within a character end it."""
    pieces: list[tuple[list[int], str]] = [(card.tokenizer.encode_text(letter), letter) for letter in text]
    for name in names:
        at = data.draw(st.integers(0, len(pieces)))
        pieces.insert(at, ([card.tokenizer.special_id(name)], ""))
    tokens, expected, n_chars = [], list[int](), 0
    for ids, shown in pieces:
        tokens += ids
        expected += [n_chars] * len(ids)
        n_chars += len(shown)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens) - 1)))) if len(tokens) > 1 else ())
    resume_after = data.draw(st.integers(0, len(tokens)))
    output = OutputProcessor(
        card.tokenizer,
        ResponseParser(card.tokenizer, thinking=False, call_form=ToolCallForm.DROPPED),
        with_logprobs=True,
        resume_after=resume_after,
    )
    found: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        rows = [common_pb2.PositionLogprobs(logprob=-1.0) for _ in range(start, end)]
        for event in output.push(tokens[start:end], rows):
            found += [row.text_offset for row in event.delta.logprobs]
    assert found == expected[resume_after:]


@given(
    text=st.text(st.sampled_from("abc"), max_size=12),
    stop=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=2),
    data=st.data(),
)
def test_tokens_of_a_stop_string_begin_at_the_end_of_the_text(
    card: ModelCard, text: str, stop: list[str], data: st.DataObject
) -> None:
    """A token each character. Whatever is held back: a resume repeats and loses neither text nor rows."""
    tokens = [card.tokenizer.encode_text(letter)[0] for letter in text]
    rows = [common_pb2.PositionLogprobs(logprob=-float(n)) for n in range(len(tokens))]

    def deltas_of(resume_after: int = 0, *, pieces: int = 1) -> list[list[router_pb2.Delta]]:
        """Those before the end, and those with it."""
        output = OutputProcessor(
            card.tokenizer,
            ResponseParser(card.tokenizer, thinking=False, stop=stop),
            with_logprobs=True,
            resume_after=resume_after,
        )
        events = []
        for at in range(0, len(tokens), pieces):
            events += output.push(tokens[at : at + pieces], rows[at : at + pieces])
        return [[event.delta for event in part] for part in (events, output.finish())]

    def folded(deltas: Sequence[router_pb2.Delta]) -> tuple[str, list[tuple[float, int]]]:
        found = [(row.logprob, row.text_offset) for delta in deltas for row in delta.logprobs]
        return "".join(delta.text for delta in deltas), found

    deltas, last = deltas_of(pieces=data.draw(st.integers(1, 4)))
    shown, found = folded([*deltas, *last])
    ends = [text.find(each) + len(each) for each in stop if each in text]
    n_taken = min(ends, default=len(text))
    assert found == [(-float(n), min(n, len(shown))) for n in range(n_taken)]
    seen = data.draw(st.integers(0, len(deltas)))
    rest, last = deltas_of(deltas[seen - 1].completion_tokens if seen else 0)
    assert folded([*deltas[:seen], *rest, *last]) == (shown, found)


@given(st.data())
def test_resuming_at_any_reported_offset_loses_and_repeats_nothing(
    card: ModelCard, data: st.DataObject
) -> None:
    tokens = whole_answer(card)
    size = data.draw(st.integers(1, 5))
    deltas = run(make_processor(card), tokens, range(size, len(tokens), size))
    seen = data.draw(st.integers(0, len(deltas)))
    offset = deltas[seen - 1].completion_tokens if seen else 0
    rest = run(make_processor(card, resume_after=offset), tokens, range(3, len(tokens), 3))
    assert fold([*deltas[:seen], *rest]) == fold(deltas)


def test_reasoning_of_one_batch_is_parsed_in_one_call(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = card.tokenizer.encode_text("Hmm 你好.")
    end = card.tokenizer.special_id("</think>")
    taken: list[int] = []
    push = ResponseParser.push

    def count(parser: ResponseParser, ids: Sequence[int]) -> Any:
        taken.append(len(ids))
        return push(parser, ids)

    monkeypatch.setattr(ResponseParser, "push", count)
    output = make_processor(card)
    assert fold([event.delta for event in output.push(tokens)])[1] == "Hmm 你好."
    assert (taken, output.reasoning_tokens) == ([len(tokens)], len(tokens))
    output.push([*tokens, end, *tokens])
    # The batch with the end of the reasoning is parsed token by token.
    assert taken[1:] == [1] * (2 * len(tokens) + 1)
    assert output.reasoning_tokens == 2 * len(tokens) + 1


def test_an_answer_in_one_batch_is_one_message(card: ModelCard) -> None:
    deltas = [event.delta for event in make_processor(card).push(whole_answer(card))]
    assert len(deltas) == 1
    text, reasoning, calls = fold(deltas)
    assert (text, reasoning) == ("On its way 😀.", "Hmm 你好.")
    assert calls == [[f"functions.look:{i}", "look", '{"city": "Ås"}'] for i in range(2)]
    # The closing control tokens have no content: a resume may start before or after them.
    assert deltas[-1].completion_tokens == len(whole_answer(card)) - 3


def test_a_forced_prefix_is_sent_with_the_first_token(card: ModelCard) -> None:
    encode, special = card.tokenizer.encode_text, card.tokenizer.special_id
    forced = [
        special("<|tool_calls_section_begin|>"),
        special("<|tool_call_begin|>"),
        *encode("functions.look:0"),
        special("<|tool_call_argument_begin|>"),
    ]
    output = OutputProcessor(card.tokenizer, ResponseParser(card.tokenizer, thinking=False), forced=forced)
    (event,) = output.push(encode("{"))
    delta = event.delta
    assert (delta.tool_calls[0].name, delta.tool_calls[0].arguments) == ("look", "{")
    assert output.tokens == encode("{")


@pytest.mark.parametrize("n_top", [0, 2])
def test_every_token_but_the_end_token_has_logprobs(card: ModelCard, n_top: int) -> None:
    tokens = [*card.tokenizer.encode_text("😀 way"), card.stop_token_ids[-1]]
    top = [common_pb2.TokenLogprob(token_id=i, logprob=-1.0) for i in range(n_top)]
    logprobs = [common_pb2.PositionLogprobs(logprob=-0.25, top=top)] * len(tokens)
    output = make_processor(card, logprobs=True)
    shown = [item for event in output.push(tokens, logprobs) for item in event.delta.logprobs]
    assert b"".join(item.token_bytes for item in shown).decode() == "😀 way"
    assert all(len(item.top) == n_top for item in shown)
