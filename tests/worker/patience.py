"""Long time-outs for tests whose peers may be slow but do not hang."""

from __future__ import annotations

import pytest

from tests.worker.nodes import WAIT_S


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the time-outs for hanging peers; a test of a time-out sets it afterwards."""
    for name in (
        "libs.worker.pins.pin_calls.PIN_TIMEOUT_S",
        "libs.worker.pins.pin_calls.RELEASE_TIMEOUT_S",
        "libs.worker.offload.block_writer._RESERVE_TIMEOUT_S",
        "libs.worker.offload.block_writer._COMMIT_TIMEOUT_S",
        "libs.worker.restore.block_fetcher.READ_TIMEOUT_S",
        "services.decode.handoff._RPC_TIMEOUT_S",
    ):
        monkeypatch.setattr(name, WAIT_S)
