"""The workers of a cluster in this process, with one shared model."""

from __future__ import annotations

import contextlib

from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.cluster.fingerprint import Fingerprint
from libs.common.cluster.worker_record import Role
from slipstream.rpc.tls import TlsFiles
from tests.router.support.fake_model import FakeModel
from tests.router.support.fake_workers import FINGERPRINT, FakeDecode, FakePrefill, FakeWorker
from tests.support.stubs.partial_servicer import partial_servicer


class FakeCluster:
    """Workers by name, and one model for all of them."""

    def __init__(
        self, model: FakeModel, *, prefills: int = 2, decodes: int = 2, tls: TlsFiles | None = None
    ) -> None:
        self.discovery = InMemoryDiscovery()
        self.model = model
        self.prefills = [
            partial_servicer(FakePrefill, f"prefill-{i}", self.discovery, model, tls) for i in range(prefills)
        ]
        self.decodes = [
            FakeDecode(f"decode-{i}", self.discovery, model, self.prefills, tls=tls) for i in range(decodes)
        ]
        self.kvstore = FakeWorker(Role.KVSTORE, "kvstore-0", self.discovery, tls=tls)

    def add_decode(self, instance: str, fingerprint: Fingerprint = FINGERPRINT) -> FakeDecode:
        """Add a decode worker or a new incarnation of one; the caller starts it."""
        self.decodes.append(FakeDecode(instance, self.discovery, self.model, self.prefills, fingerprint))
        return self.decodes[-1]

    @property
    def engines(self) -> list[FakePrefill | FakeDecode]:
        return [*self.prefills, *self.decodes]

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.engines, self.kvstore]

    @property
    def held(self) -> list[str]:
        return [f"{worker.instance}:{name}" for worker in self.workers for name in worker.held]

    async def __aenter__(self) -> FakeCluster:
        for worker in self.workers:
            await worker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            with contextlib.suppress(Exception):
                await worker.stop()
