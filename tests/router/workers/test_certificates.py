"""A router whose certificates are replaced finds its workers again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from libs.common.cluster.worker_record import Role, Worker
from libs.common.rpc.serve import ServiceHost
from libs.common.telemetry.paced_warnings import WARN_EVERY_S, PacedWarnings
from services.router.request.model_card import ModelCard
from services.router.workers.connection import WorkerConnection
from slipstream.rpc.dial import PLAIN_DIAL, Dial
from slipstream.rpc.tls import TlsFiles
from tests.router.conftest import eventually, open_router
from tests.router.support.connection_owner import AnyWorker
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.support.network.fault_proxy import FaultProxy
from tests.support.tls.authority import Authority, install

log = logging.getLogger(__name__)


def files_in(directory: Path, source: TlsFiles) -> TlsFiles:
    directory.mkdir()
    files = TlsFiles(directory / "ca.pem", directory / "own.pem", directory / "own.key")
    install(source, files)
    return files


async def test_a_lost_connection_is_made_again_with_the_new_certificate(
    tmp_path: Path, model: FakeModel, card: ModelCard
) -> None:
    """Both ends move to another authority while a connection is open; then the connection breaks."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    workers = files_in(tmp_path / "workers", old.issue("worker"))
    own = files_in(tmp_path / "own", old.issue("router"))
    cluster = FakeCluster(model, prefills=1, decodes=1, tls=workers)
    async with FaultProxy(cluster.decodes[0].host.endpoint) as proxy:
        cluster.decodes[0].worker = replace(cluster.decodes[0].worker, endpoint=proxy.endpoint)
        async with cluster, open_router(cluster, card, tls=own) as router:
            first = router.fleet.find(Role.DECODE, "decode-0")
            assert first is not None and first.ready
            install(new.issue("worker"), workers)
            install(new.issue("router"), own)
            assert first.ready  # what is open stays open
            proxy.reset()
            await eventually(lambda: not first.ready)

            def is_back() -> bool:
                link = router.fleet.find(Role.DECODE, "decode-0")
                return link is not None and link is not first and link.ready

            await eventually(is_back)
            assert router.fleet.links_of(Role.DECODE) == (router.fleet.find(Role.DECODE, "decode-0"),)
            others = [link for link in router.fleet.links() if link.worker.role is not Role.DECODE]
            assert len(others) == 2 and all(link.ready for link in others)


def connection(endpoint: str, dial: Dial, *, clock: Callable[[], float]) -> WorkerConnection:
    return WorkerConnection(
        Worker(Role.DECODE, "decode-0", endpoint, "first"),
        AnyWorker(),
        dial=dial,
        clock=clock,
        warnings=PacedWarnings(log, clock=clock, every_s=0.0),
        news=PacedWarnings(log, clock=clock, every_s=0.0, level=logging.INFO),
    )


async def test_a_worker_with_a_certificate_of_another_authority_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    host = ServiceHost("127.0.0.1:0", tls=theirs.issue("worker"))
    await host.start(["x"])
    link = connection(host.endpoint, Dial(ours.issue("router")), clock=lambda: 0.0)
    try:
        await eventually(lambda: bool(warned(caplog)))
        assert warned(caplog)[0].startswith(f"decode-0 at {host.endpoint} gets no requests: ")
        assert "the TLS handshake fails (CERTIFICATE_VERIFY_FAILED)" in warned(caplog)[0]
    finally:
        await link.close()
        await host.stop(grace_s=0)


async def test_a_worker_that_does_not_answer_for_long_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    link = connection("127.0.0.1:1", PLAIN_DIAL, clock=lambda: now_s)
    try:
        caplog.set_level("INFO")
        await eventually(lambda: len(caplog.messages) >= 2)
        assert not warned(caplog)
        now_s = WARN_EVERY_S
        await eventually(lambda: bool(warned(caplog)))
        assert warned(caplog)[0].startswith("decode-0 at 127.0.0.1:1 does not answer for 30 s: ")
    finally:
        await link.close()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
