"""PromptEncoder: steps give the ids of the whole text, and a prompt that is far too long ends early."""

from __future__ import annotations

from typing import Any

import pytest

from libs.text.response_parser import ToolCallForm
from libs.text.tokenizer import MAX_ENCODE_CHARS, Tokenizer
from services.router.request import prompt_encoder
from services.router.request.conversations.token_cache import TokenCache
from services.router.request.model_card import ModelCard
from services.router.request.prompt import Encoded, PromptDraft
from services.router.request.prompt_encoder import PromptEncoder
from services.router.request.types import ChatInput, GenerationRequest, PromptInput
from slipstream.errors import InvalidArgument
from tests.text.corpus import WEATHER_TOOL


def draft_of(card: ModelCard, text: str, *, chat: bool) -> PromptDraft:
    given: Any = ChatInput([{"role": "user", "content": text}]) if chat else PromptInput(text)
    return PromptDraft.of(GenerationRequest(given), card, TokenCache(), tenant="t")


def run(encoder: PromptEncoder) -> None:
    while encoder.step() is None:
        pass


@pytest.mark.parametrize("chat", [True, False])
def test_steps_give_what_encoding_at_once_gives(
    card: ModelCard, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_encoder, "STEP_TOKENS", 1)
    text = "Your order left the warehouse. " * 20_000  # 620,000 characters: two pieces
    encoder = PromptEncoder(draft_of(card, text, chat=chat))
    found: Encoded | None = None
    steps = 0
    while found is None:
        found = encoder.step()
        steps += 1
    assert steps >= 2
    assert found == draft_of(card, text, chat=chat).encode()


@pytest.mark.parametrize(("chat", "field"), [(True, "messages"), (False, "prompt")])
def test_a_prompt_that_is_far_too_long_is_not_encoded_to_its_end(
    card: ModelCard, chat: bool, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    encode_piece = Tokenizer._encode_piece

    def counted(tokenizer: Tokenizer, text: str) -> list[int]:
        pieces.append(len(text))
        return encode_piece(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "_encode_piece", counted)
    encoder = PromptEncoder(draft_of(card, "\x01" * (8 << 20), chat=chat))
    with pytest.raises(InvalidArgument, match=r"at least [0-9]+ tokens in the prompt") as caught:
        run(encoder)
    assert caught.value.field == field
    assert sum(pieces) <= 3 * MAX_ENCODE_CHARS


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (PromptInput("f"), ToolCallForm.TEXT),
        (ChatInput([{"role": "user", "content": "f"}]), ToolCallForm.DROPPED),
        (ChatInput([{"role": "user", "content": "f"}], tools=[WEATHER_TOOL]), ToolCallForm.PARSED),
    ],
)
def test_tool_calls_after_a_bare_prompt_are_text(
    card: ModelCard, given: ChatInput | PromptInput, form: ToolCallForm
) -> None:
    draft = PromptDraft.of(GenerationRequest(given), card, TokenCache(), tenant="t")
    assert draft.finish(draft.encode(), request_id="r").call_form is form
