"""What a decode worker builds its engine with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.decode import app as app_module
from services.decode.app import DecodeApp
from services.decode.settings import DecodeSettings


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"drafts": "off"}, 0),
        ({"draft_tokens": 0}, 0),
        ({"draft_model": None}, 0),
        ({"drafter": "local"}, 8),
        ({"drafter": "local", "draft_tokens": 3}, 3),
        ({"drafter": "local", "draft_tokens": 20}, 8),
    ],
)
async def test_steps_have_room_for_the_drafts_that_may_come(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], wanted: int
) -> None:
    """Buffers and graphs of verify rows are as large as that."""
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(app_module, "engine_builder", lambda *_, **given: built.append(given))
    settings = {"instance": "d", "model": Path("m"), "draft_model": Path("h"), **flags}
    app = DecodeApp(DecodeSettings(**settings))
    discovery: Any = None  # a local head needs none
    await app.make_draft_source(discovery)
    app.make_builder()
    assert [given["max_draft_tokens"] for given in built] == [wanted]
    assert not app.wants_features, "without a source of drafts no one reads them"
