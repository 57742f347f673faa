"""Patience with a slow machine, but where peers hang."""

from __future__ import annotations

import pytest

from tests.worker.patience import be_patient


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not request.module.__name__.endswith("test_restore_silent"):
        be_patient(monkeypatch)
