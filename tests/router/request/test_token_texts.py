"""Texts of token ids: what is refused, and what runs on a thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.common.service_bounds import MAX_DECODED_TOKENS
from services.router.admission.fair_threads import FairThreads
from services.router.request.model_card import ModelCard, load_model_card
from services.router.request.token_texts import TokenTexts
from services.router.request.types import Caller
from slipstream.errors import InvalidArgument

CALLER = Caller(tenant="t")
MODEL_DIR = Path(__file__).parents[3] / "models" / "slipstream-mini"


class CountedThreads(FairThreads):
    ran = 0

    async def run(self, *args: Any, **more: Any) -> Any:
        self.ran += 1
        return await super().run(*args, **more)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return load_model_card(MODEL_DIR)


@pytest.fixture
def threads() -> Iterator[CountedThreads]:
    made = CountedThreads(n_threads=1)
    yield made
    made.close()


async def test_many_ids_are_decoded_off_the_event_loop(card: ModelCard, threads: CountedThreads) -> None:
    texts = TokenTexts(card, threads)
    end = card.tokenizer.special_id("<|im_end|>")
    assert await texts.text([104, 105, end], CALLER, field="tokens") == "hi<|im_end|>"
    assert await texts.each([104, end], CALLER) == ["h", "<|im_end|>"]
    assert threads.ran == 0
    # Bytes that were joined id by id would take hours.
    assert await texts.text([104] * MAX_DECODED_TOKENS, CALLER, field="tokens") == "h" * MAX_DECODED_TOKENS
    assert await texts.each([104] * 5000, CALLER) == ["h"] * 5000
    assert threads.ran == 2


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([97] * (MAX_DECODED_TOKENS + 1), f"must have at most {MAX_DECODED_TOKENS} token ids"),
        ([97, 1 << 31], "must hold token ids from 0 to"),
        ([-1], "must hold token ids from 0 to"),
    ],
)
async def test_ids_that_cannot_be_decoded_are_refused(
    card: ModelCard, threads: CountedThreads, ids: list[int], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as refusal:
        await TokenTexts(card, threads).text(ids, CALLER, field="token_ids")
    assert refusal.value.field == "token_ids"
