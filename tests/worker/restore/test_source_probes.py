"""Probes of failed KV sources go on until the source answers."""

from __future__ import annotations

import time

import pytest

from libs.common.rpc.serve import ServiceHost
from libs.worker.pins.peers import Peers
from libs.worker.restore import source_probes
from libs.worker.restore.source_probes import SourceProbes
from tests.worker.nodes import eventually


class LateBook:
    """An address book that discovery has not filled yet."""

    def __init__(self) -> None:
        self.n_asked = 0
        self.is_filled = False

    def knows_endpoint(self, endpoint: str) -> bool:
        self.n_asked += 1
        return self.is_filled


async def test_probes_go_on_while_the_address_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_probes, "PROBE_EVERY_S", 0.02)
    host, book = ServiceHost("127.0.0.1:0"), LateBook()
    await host.start([])
    peers = Peers(addresses=book)  # type: ignore[arg-type]
    probes = SourceProbes(peers, clock=time.monotonic)
    probes.record_timeout(host.endpoint)
    await eventually(lambda: book.n_asked > 1, "a second probe")
    book.is_filled = True
    await eventually(lambda: host.endpoint not in probes.breaker, "an answered probe")
    await probes.close()
    await peers.close()
    await host.stop(grace_s=0)
