"""A disk at start: direct or buffered I/O, progress of the scan, errors of the directory."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from libs.common.checksum import checksum, memory_at
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.config import check_disks
from services.kvstore.disk.native.reads import NativeReader
from services.kvstore.disk.segments.restore import PROGRESS_S, open_disk
from services.kvstore.disk.tier import DiskTier
from slipstream.errors import FailedPrecondition
from tests.kvstore.disk.memory_disk import MemoryDisk
from tests.support.processes.open_files import open_files

N_BLOCKS = 40
BLOCK_BYTES = 3 * PAGE_BYTES - 100


def key(number: int) -> bytes:
    return checksum(b"key %d" % number)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


async def put_all(tier: DiskTier, memory: PageAlignedMemory) -> None:
    for number in range(N_BLOCKS):
        memory.view(0, BLOCK_BYTES)[:] = payload(number)
        assert await tier.write(key(number), memory.address, BLOCK_BYTES, checksum(payload(number)))


async def check_all(tier: DiskTier, memory: PageAlignedMemory) -> None:
    places = [memory.address + 3 * PAGE_BYTES * number for number in range(N_BLOCKS)]
    found = await tier.read_many([(key(number), places[number]) for number in range(N_BLOCKS)])
    assert found == [(BLOCK_BYTES, checksum(payload(number))) for number in range(N_BLOCKS)]
    for number, place in enumerate(places):
        assert bytes(memory_at(place, BLOCK_BYTES)) == payload(number)


def refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse direct I/O at open, like older tmpfs."""
    plain = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, mode)

    monkeypatch.setattr("os.open", refusing)


def refuse_at_the_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse direct I/O at the first read, like some network and stacked filesystems."""
    plain, opened = os.preadv, os.open
    direct: set[int] = set()

    def recording_open(path: Any, flags: int, mode: int = 0o777) -> int:
        fd = opened(path, flags, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def refusing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(fd, buffers, offset)

    monkeypatch.setattr("os.open", recording_open)
    monkeypatch.setattr("os.preadv", refusing)


@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_the_first_read])
async def test_files_are_buffered_with_a_warning_where_direct_io_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuse: Any
) -> None:
    refuse(monkeypatch)
    memory = PageAlignedMemory(3 * N_BLOCKS * PAGE_BYTES)
    with caplog.at_level(logging.WARNING, "services.kvstore"):
        for start in range(2):
            tier = DiskTier(tmp_path / "kv", disk_bytes=4 << 20)
            tier.open()
            assert not tier.files.io.direct
            assert isinstance(tier._reads, NativeReader)  # buffered files are not read by io_uring
            if start == 0:
                await put_all(tier, memory)
            await check_all(tier, memory)
            assert tier.corrupt_blocks == tier.io_errors == 0
            tier.close()
    messages = [record.getMessage() for record in caplog.records]
    assert (
        messages
        == [f"disk tier: the filesystem of {tmp_path / 'kv'} refuses direct I/O: files are buffered"] * 2
    )
    assert not [target for _, target in open_files() if "segment-" in target]


async def test_a_scan_logs_its_progress_and_its_result(caplog: pytest.LogCaptureFixture) -> None:
    disk, memory = MemoryDisk(record=False), PageAlignedMemory(3 * PAGE_BYTES)
    filled = DiskTier(Path("/memory"), disk_bytes=1 << 20, io=disk)
    filled.open()
    await put_all(filled, memory)
    n_segments = filled.files.n_open
    filled.close()
    assert n_segments > 3
    now_s = 0.0

    def clock_s() -> float:
        nonlocal now_s
        now_s += PROGRESS_S / 2  # two clock reads for a logged segment, else one
        return now_s

    again = DiskTier(Path("/memory"), disk_bytes=1 << 20, io=disk)
    steps: list[None] = []
    with caplog.at_level(logging.INFO, "services.kvstore"):
        found = open_disk(again.table, again.files, clock_s=clock_s, on_step=lambda: steps.append(None))
    again.files.io.close(found.lock_fd)
    *progress, last = [record.getMessage() for record in caplog.records]
    reported = [int(line.split()[2]) for line in progress]
    assert (
        len(reported) >= n_segments // 2 and reported == sorted(set(reported)) and reported[-1] <= n_segments
    )
    assert all(line.endswith(f"of {n_segments} segments of /memory read") for line in progress)
    assert f"{N_BLOCKS} blocks in {n_segments} segments of /memory found" in last and "direct I/O" in last
    assert len(steps) == n_segments + 2  # plus the directory and the probe
    assert again.table.n_blocks == N_BLOCKS
    again.close()
    assert disk.n_open == 0


def test_an_unwritable_directory_is_refused_and_a_small_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = os.statvfs(tmp_path)
    total = filesystem.f_blocks * filesystem.f_frsize
    room = filesystem.f_bavail * filesystem.f_frsize
    if room < total:
        warnings = check_disks([tmp_path], total >> 26 << 26)
        assert any("bytes are free, the tier stays smaller" in warning for warning in warnings)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(FailedPrecondition, match=f"{tmp_path} is not writable for uid {os.geteuid()}"):
        check_disks([tmp_path], 8 << 20)


def test_a_read_only_filesystem_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may become writable again, and its blocks are readable meanwhile."""
    fields = list(os.statvfs(tmp_path))
    fields[8] |= os.ST_RDONLY
    monkeypatch.setattr("os.statvfs", lambda path: os.statvfs_result(fields))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (warning,) = check_disks([tmp_path], 8 << 20)
    assert warning == f"{tmp_path} is on a filesystem that is read-only now: it takes no blocks"
