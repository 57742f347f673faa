"""The drafter's process: what its settings make of the head's thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.common.cluster.discovery import InMemoryDiscovery
from libs.common.transport.base import Region, TransferRefused
from libs.common.transport.socket import SocketTransport
from libs.engine.core import build
from libs.engine.core.build import build_drafter
from libs.engine.kernels.library import load_library
from libs.engine.kernels.native import NativeKernels
from libs.engine.step.draft_head import ContextRows
from libs.worker.process.settings import WorkerSettings
from services.drafter.app import DrafterApp
from tests.engine.random_head import RandomHead, write_random_head
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of each pool of kernels that a load makes."""
    made = []

    class Recorded(NativeKernels):
        def __init__(self, library: object, threads: int) -> None:
            made.append(threads)
            super().__init__(library, threads)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "NativeKernels", Recorded)
    return made


@pytest.mark.parametrize("stated", [3, None])
def test_only_the_kernels_have_threads_beside_the_heads(
    tmp_path: Path, pools: list[int], monkeypatch: pytest.MonkeyPatch, stated: int | None
) -> None:
    """Attention of a head is torch's, whose idle threads would spin on the cores of the pool."""
    target, head_dir = tmp_path / "target", tmp_path / "head"
    write_random_checkpoint(target, RandomCheckpoint(dtype="float32", prefix="language_model."))
    write_random_head(head_dir, RandomHead())
    monkeypatch.setattr(build, "threads_at_start", lambda: 2)
    options = WorkerSettings(instance="d0", model=target, draft_model=head_dir, threads=stated)

    def load_and_draft() -> tuple[int, int, int]:
        torch.set_num_threads(4)
        before = torch.get_num_threads()
        head = DrafterApp(options)._load_head()
        rows = ContextRows("s", 0, np.ones(8, np.uint32), np.ones((8, head.feature_width), np.float32))
        head.extend_batch([rows])
        return before, len(head.propose_batch(["s"], 3)["s"]), torch.get_num_threads()

    with ThreadPoolExecutor(1) as thread:  # the setting belongs to the thread
        assert thread.submit(load_and_draft).result() == (4, 3, 1)
    assert pools == [stated or 2]


def test_a_head_beside_an_engine_changes_no_threads(tmp_path: Path, pools: list[int]) -> None:
    target, head_dir = tmp_path / "target", tmp_path / "head"
    write_random_checkpoint(target, RandomCheckpoint(dtype="float32", prefix="language_model."))
    write_random_head(head_dir, RandomHead())

    def load() -> int:
        torch.set_num_threads(2)
        build_drafter(head_dir, target, kernels=NativeKernels(load_library(), 1))
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(load).result() == 2
    assert not pools


@pytest.mark.parametrize(
    ("transport", "kind"), [("socket", "socket"), ("auto", "socket"), ("rdma:no-such-device", "none")]
)
async def test_a_drafter_reads_by_its_transport_or_serves_without_one(transport: str, kind: str) -> None:
    """Without one features travel in messages: a drafter that does not start would cost all drafts."""
    app = DrafterApp(WorkerSettings(instance="drafter-0", engine="fake", transport=transport))
    await app.open("127.0.0.1:0", InMemoryDiscovery(), lambda: None)
    assert app.transport_kind == kind
    assert app.ledger().transfers == 0
    await app.close()


class FullTransport(SocketTransport):
    """Registers no memory, as a device beyond the memory that a process may lock."""

    is_closed = False

    def _check_destination(self, region: Region) -> None:
        raise TransferRefused("no memory can be locked")

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


async def test_a_drafter_serves_whose_transport_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = FullTransport()
    monkeypatch.setattr("services.drafter.app.open_transport", lambda *_, **__: transport)
    app = DrafterApp(WorkerSettings(instance="drafter-0", engine="fake"))
    await app.open("127.0.0.1:0", InMemoryDiscovery(), lambda: None)
    assert (app.transport_kind, app.ledger().transfers, transport.is_closed) == ("none", 0, True)
    await app.close()
