"""A kvstore process whose disk hangs at start or shutdown (bench/faults/disk_shim.c).

The process serves at once, opens the disk when it answers, and ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.faults.faulty_disk import FaultyDisk
from libs.common.checksum import UNKEYED
from libs.common.cluster.worker_record import Role
from services.kvstore.disk.opening import HANGS_AFTER_S, START_WAIT_S, ProgressTimeout
from supervisor.ports import free_ports
from tests.support.clusters.worker_processes import WorkerProcess
from tests.support.processes.launching import run_service
from tests.support.processes.process_checks import all_gone
from tests.worker.nodes import eventually, running_nodes
from tests.worker.restore.test_restore_silent import prefill

UNAVAILABLE, ON_DISK = "slipstream_kvstore_disk_unavailable", "slipstream_kvstore_blocks_nvme"
N_BLOCKS = 21 - 1  # of the prompt's 82 tokens, whole blocks of four


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    shim = tmp_path / "shim"
    shim.mkdir()
    with FaultyDisk(shim, tmp_path / "data") as faulty:
        yield faulty


def kvstore(tmp_path: Path, disk: FaultyDisk) -> WorkerProcess:
    arguments = (
        "--data-dir",
        str(disk.directory),
        "--disk-bytes",
        str(8 << 20),
        "--dram-bytes",
        str(1 << 20),
    )
    (port,) = free_ports(1, rng=Random())
    return WorkerProcess(Role.KVSTORE, "k", port, tmp_path, *arguments, environment=disk.environment)


async def until(worker: WorkerProcess, name: str, value: float) -> None:
    async with asyncio.timeout(120):
        while (await worker.status()).counters[name] != value:
            await asyncio.sleep(0.02)


async def test_a_disk_that_hangs_at_start_opens_when_it_answers(tmp_path: Path, disk: FaultyDisk) -> None:
    async with running_nodes() as nodes:
        worker = await nodes.prefill("prefill-1", checksum=UNKEYED)
        async with kvstore(tmp_path, disk) as store:
            await prefill(worker, worker.channel, 0, kvstore_endpoint=store.endpoint)
            await until(store, ON_DISK, N_BLOCKS)
            os.kill(store.pid, signal.SIGTERM)
            await all_gone([store.pid], timeout_s=60)
        disk.hang()
        before = disk.bitten()
        async with kvstore(tmp_path, disk) as store:  # it answers although its disk hangs
            assert disk.bitten() > before and disk.waiting() > 0
            status = await store.status()
            assert (status.counters[UNAVAILABLE], status.counters[ON_DISK]) == (1, 0)
            # It keeps new blocks.
            await prefill(worker, worker.channel, 1, kvstore_endpoint=store.endpoint)
            await worker.core.writer.flush(timeout_s=60)
            assert (await store.status()).counters["slipstream_kvstore_blocks_dram"] == N_BLOCKS
            disk.heal()
            await until(store, UNAVAILABLE, 0)
            await until(store, ON_DISK, 2 * N_BLOCKS)  # the earlier blocks and the new ones
            other = await nodes.prefill("prefill-2", checksum=UNKEYED)
            found = await prefill(other, other.channel, 0, kvstore_endpoint=store.endpoint)
            assert sum(found.values()) == N_BLOCKS * 4
        await worker.wait_idle()


async def test_a_store_whose_disk_hung_at_start_ends_on_sigterm(tmp_path: Path, disk: FaultyDisk) -> None:
    disk.hang()
    async with kvstore(tmp_path, disk) as store:
        assert disk.waiting() > 0
        os.kill(store.pid, signal.SIGTERM)
        await all_gone([store.pid], timeout_s=60)


@pytest.mark.soak
@pytest.mark.parametrize("kinds", [("read", "write", "sync"), ()], ids=["blocks", "everything"])
async def test_a_store_whose_disk_hangs_ends_on_sigterm(
    kinds: tuple[str, ...], tmp_path: Path, disk: FaultyDisk
) -> None:
    async with running_nodes() as nodes, kvstore(tmp_path, disk) as store:
        worker = await nodes.prefill("prefill-1", checksum=UNKEYED)
        disk.hang(*kinds)
        await prefill(worker, worker.channel, 0, kvstore_endpoint=store.endpoint)
        await eventually(lambda: disk.waiting() > 0, "a call that hangs")
        os.kill(store.pid, signal.SIGTERM)
        await all_gone([store.pid], timeout_s=60)
        assert disk.waiting() > 0  # the disk still hangs
        with pytest.raises(grpc.aio.AioRpcError):
            await store.status()


def test_an_unusable_directory_is_refused_although_it_opens_in_the_background(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(b"")
    command = [sys.executable, "-m", "services.kvstore", "--instance", "k", "--run-dir", str(tmp_path)]
    command += ["--data-dir", str(tmp_path / "file" / "below"), "--disk-bytes", str(8 << 20)]
    code, said = run_service(command)
    assert code == 2 and "is not writable" in said


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=400),
    hangs_after_s=st.floats(0.2, 3.0),
)
def test_the_progress_time_out_extends_with_progress_and_ignores_its_own_pauses(
    steps: list[tuple[float, bool]], hangs_after_s: float
) -> None:
    progress, now_s, n_steps, polls = ProgressTimeout(now_s=0.0, hangs_after_s=hangs_after_s), 0.0, 0, 0
    for passed_s, on_step in steps:
        now_s += passed_s
        n_steps += on_step
        polls = 0 if on_step else polls + 1
        if not progress.should_wait(n_steps=n_steps, now_s=now_s):
            assert now_s >= START_WAIT_S or polls * 0.1 >= hangs_after_s - 1e-9
            return
    assert now_s < START_WAIT_S


def test_a_disk_without_progress_times_out() -> None:
    progress, now_s = ProgressTimeout(now_s=0.0), 0.0
    while progress.should_wait(n_steps=0, now_s=now_s):
        now_s += 0.05
    assert now_s == pytest.approx(HANGS_AFTER_S, abs=0.06)
