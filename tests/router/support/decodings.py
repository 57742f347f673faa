"""Where a router decodes the token ids of a prompt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from services.router.request.model_card import ModelCard


def note_decodings(card: ModelCard, ids: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The decodings of these ids from now on: whether each was on the thread of the event loop."""
    decode, loop_thread = card.tokenizer.decode, threading.get_ident()
    decodings: list[bool] = []

    def noted(given: Sequence[int], **options: Any) -> str:
        if list(given) == list(ids):
            decodings.append(threading.get_ident() == loop_thread)
        return decode(given, **options)

    monkeypatch.setattr(card.tokenizer, "decode", noted)
    return decodings
