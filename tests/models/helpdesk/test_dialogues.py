"""Generated dialogues are deterministic, valid, and solvable from their own text."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from models.helpdesk.dialogues import (
    LONG,
    SHORT,
    Dialogue,
    DialogueShape,
    generate_dialogue,
    generate_dialogues,
)
from models.helpdesk.tools import TOOLS_BY_NAME
from models.settings import HELD_OUT_SEED, TRAIN_SEED


def _text_before(dialogue: Dialogue, index: int) -> str:
    parts = []
    for message in dialogue.messages[:index]:
        parts.append(str(message["content"]))
        parts += [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return "\n".join(parts)


@pytest.mark.parametrize("shape", [SHORT, LONG])
def test_the_same_seed_gives_the_same_dialogue(shape: DialogueShape) -> None:
    assert generate_dialogue(5, 3, shape) == generate_dialogue(5, 3, shape)
    assert generate_dialogue(5, 3, shape) != generate_dialogue(5, 4, shape)
    assert generate_dialogue(5, 3, shape) != generate_dialogue(6, 3, shape)


def test_a_change_of_the_corpus_is_noticed() -> None:
    """After a change of the corpus the model must be trained again."""
    dialogue = generate_dialogue(TRAIN_SEED, 3)
    assert dialogue.messages[3]["content"] == "When will my order arrive?"


@pytest.mark.parametrize(("shape", "count"), [(SHORT, 300), (LONG, 5)])
def test_calls_follow_the_schema_and_copy_from_the_conversation(shape: DialogueShape, count: int) -> None:
    calls = 0
    for dialogue in generate_dialogues(HELD_OUT_SEED, count, shape=shape):
        schemas: dict[str, Any] = {t["function"]["name"]: t["function"]["parameters"] for t in dialogue.tools}
        for index, message in enumerate(dialogue.messages):
            for call in message.get("tool_calls", ()):
                assert call["id"].startswith(f"functions.{call['function']['name']}:")
                arguments = json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, schemas[call["function"]["name"]])
                text_before = _text_before(dialogue, index)
                enums = TOOLS_BY_NAME[call["function"]["name"]].enums
                for name, value in arguments.items():
                    assert name in enums or str(value) in text_before
                calls += 1
    assert calls > count


@pytest.mark.parametrize(("shape", "count"), [(SHORT, 300), (LONG, 5)])
def test_answers_state_only_values_from_the_conversation(shape: DialogueShape, count: int) -> None:
    answers = 0
    for dialogue in generate_dialogues(HELD_OUT_SEED, count, shape=shape):
        for check in dialogue.checks:
            content = str(dialogue.messages[check.index]["content"])
            text_before = _text_before(dialogue, check.index)
            for value in check.values:
                assert value in content
                assert value in text_before
            answers += check.kind == "answer"
    assert answers > count


def test_every_assistant_message_has_a_check_and_roles_follow_the_openai_order() -> None:
    for dialogue in generate_dialogues(HELD_OUT_SEED, 100):
        assistants = [i for i, m in enumerate(dialogue.messages) if m["role"] == "assistant"]
        assert [check.index for check in dialogue.checks] == assistants
        assert dialogue.messages[0]["role"] == "system"
        assert 2 <= len(dialogue.tools) <= 4
        answered = {m["tool_call_id"] for m in dialogue.messages if m["role"] == "tool"}
        asked = {c["id"] for m in dialogue.messages for c in m.get("tool_calls", ())}
        assert answered == asked
        numbers = [
            int(c["id"].rpartition(":")[2]) for m in dialogue.messages for c in m.get("tool_calls", ())
        ]
        assert numbers == list(range(len(numbers)))


def test_held_out_dialogues_are_not_in_the_training_seed() -> None:
    trained = {json.dumps(d.messages) for d in generate_dialogues(TRAIN_SEED, 500)}
    assert all(json.dumps(d.messages) not in trained for d in generate_dialogues(HELD_OUT_SEED, 500))
