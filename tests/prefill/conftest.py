"""Longer time-outs for slow machines."""

from __future__ import annotations

import pytest

from tests.worker.patience import be_patient


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
