"""Pools of tests wait for answers of slow machines."""

from __future__ import annotations

import pytest

from services.kvstore.pool import tier, writes
from tests.kvstore.pool.pool_rig import FIND_S


@pytest.fixture(autouse=True)
def patient_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes later is a miss, and the pool counts as unavailable for a moment."""
    for module in (tier, writes):
        monkeypatch.setattr(module, "FIND_S", FIND_S)
