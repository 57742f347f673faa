"""Fixtures of tests that read checkpoints."""

from __future__ import annotations

import pytest

from libs.engine.model import tensor_rows


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a job, and several jobs a matrix."""
    monkeypatch.setattr(tensor_rows, "_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(tensor_rows, "_JOB_BYTES", 3 << 10)
