"""The examiner accepts the correct message and refuses wrong ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from libs.text.chat_template import encode_chat
from libs.text.tokenizer import Tokenizer
from models.bpe import write_tokenizer
from models.helpdesk.dialogues import Check, generate_dialogues
from models.settings import HELD_OUT_SEED
from models.turns import AssistantTurn, ParsedReply, dialogue_turns, judge, parse_reply, share


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("bytes")
    write_tokenizer([bytes([b]) for b in range(256)], directory)
    return Tokenizer.from_dir(directory)


def test_the_correct_message_is_right_and_identical(tokenizer: Tokenizer) -> None:
    kinds = set()
    for dialogue in generate_dialogues(HELD_OUT_SEED, 8):
        encoded = encode_chat(tokenizer, dialogue.messages, dialogue.tools, add_generation_prompt=False)
        turns = dialogue_turns(tokenizer, dialogue)
        assert len(turns) == len(encoded.assistant_spans)
        for turn, (start, end) in zip(turns, encoded.assistant_spans, strict=True):
            assert turn.prompt_ids == encoded.token_ids[:start]
            verdict = judge(turn, parse_reply(tokenizer, encoded.token_ids[start:end]))
            assert verdict.parses
            assert verdict.right
            assert verdict.identical
            kinds.add(verdict.kind)
    assert kinds == {"call", "answer", "talk"}


def _call_turn() -> AssistantTurn:
    function = {"name": "check_stock", "arguments": json.dumps({"sku": "AB-1234"})}
    expected: Mapping[str, Any] = {"content": "", "tool_calls": [{"id": "x", "function": function}]}
    return AssistantTurn([1], Check(0, "call"), expected)


@pytest.mark.parametrize(
    ("reply", "parses"),
    [
        (ParsedReply("", [("check_stock", {"sku": "AB-1235"})]), True),
        (ParsedReply("", [("get_invoice", {"sku": "AB-1234"})]), True),
        (ParsedReply("", [("check_stock", {"sku": "AB-1234"})] * 2), True),
        (ParsedReply("", [("check_stock", None)]), False),
        (ParsedReply("AB-1234", []), False),
    ],
)
def test_wrong_calls_are_wrong(reply: ParsedReply, parses: bool) -> None:
    verdict = judge(_call_turn(), reply)
    assert not verdict.right
    assert verdict.parses is parses


def test_answers_must_state_every_value() -> None:
    turn = AssistantTurn([1], Check(0, "answer", ("T-1234", "Anna")), {"content": "Ticket T-1234, Anna."})
    assert judge(turn, ParsedReply("Anna opened T-1234 for you.", [])).right
    assert not judge(turn, ParsedReply("Anna opened T-1235 for you.", [])).right
    assert not judge(turn, ParsedReply("Anna opened T-1234.", [("check_stock", {})])).right


def test_the_share_counts_only_turns_of_its_kind() -> None:
    verdicts = [judge(_call_turn(), ParsedReply("", [("check_stock", {"sku": "AB-1234"})]))]
    verdicts.append(judge(_call_turn(), ParsedReply("", [])))
    assert share(verdicts, "call", "right") == 0.5
    assert share(verdicts, "answer", "right") == 0.0
