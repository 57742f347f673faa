"""A router whose certificates are replaced finds its workers again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from libs.common.cluster.worker_record import Role
from services.router.request.model_card import ModelCard
from slipstream.rpc.tls import TlsFiles
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.support.network.fault_proxy import FaultProxy
from tests.support.tls.authority import Authority, install


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
            others = [link for link in router.fleet.links() if link.worker.role is not Role.DECODE]
            assert len(others) == 2 and all(link.ready for link in others)
