"""Long time-outs for slow machines, except in the tests of silent peers."""

from __future__ import annotations

import pytest

from tests.worker.patience import be_patient


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not request.module.__name__.endswith("test_restore_silent"):
        be_patient(monkeypatch)
