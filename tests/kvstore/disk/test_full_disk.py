"""A disk tier on a full filesystem that gets free space again."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from libs.common.checksum import checksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.health import DiskState
from services.kvstore.disk.segments.io import DiskIo, SystemDiskIo
from services.kvstore.disk.tier import DiskTier
from tests.kvstore.disk.table_check import check_table
from tests.support.processes.open_files import open_files

SMALL_BYTES, LARGER_BYTES = 6 << 20, 12 << 20


@dataclass
class SmallDisk:
    """A directory with room for SMALL_BYTES, and for LARGER_BYTES after `grow`."""

    directory: Path
    io: DiskIo
    grow: Callable[[], object]


class BudgetIo(SystemDiskIo):
    """Real files under a total size limit like that of a filesystem."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.max_bytes = SMALL_BYTES

    def fallocate(self, fd: int, n_bytes: int) -> None:
        others = sum(path.stat().st_size for path in self.segments(self.directory)) - self.n_bytes(fd)
        if others + n_bytes > self.max_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fallocate(fd, n_bytes)


def mount_tmpfs(directory: Path, *options: str) -> bool:
    """Mount a tmpfs at `directory`; return whether that succeeded."""
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(directory)]
    return mount is not None and not subprocess.run(command, capture_output=True, check=False).returncode


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A separate filesystem if this user may mount one, otherwise a budget over real files."""
    directory = tmp_path / "small"
    directory.mkdir()
    if not mount_tmpfs(directory, f"size={SMALL_BYTES}"):
        budget = BudgetIo(directory / "kv")
        yield SmallDisk(directory / "kv", budget, lambda: setattr(budget, "max_bytes", LARGER_BYTES))
        return
    larger = ["mount", "-o", f"remount,rw,size={LARGER_BYTES}", str(directory)]
    yield SmallDisk(directory / "kv", SystemDiskIo(), lambda: subprocess.run(larger, check=True))
    subprocess.run(["umount", "-l", str(directory)], check=True, capture_output=True)


def key(number: int) -> bytes:
    return checksum(b"key %d" % number)


async def test_a_tier_on_a_full_filesystem_keeps_its_blocks_and_grows_later(small_disk: SmallDisk) -> None:
    block_bytes = 16 * PAGE_BYTES
    tier = DiskTier(
        small_disk.directory, disk_bytes=8 << 20, io=small_disk.io
    )  # beyond the filesystem's size
    tier.open()
    memory = PageAlignedMemory(block_bytes)

    def bytes_of(number: int) -> bytes:
        return random.Random(number).randbytes(block_bytes)

    async def put(number: int) -> bool:
        memory.view(0, block_bytes)[:] = bytes_of(number)
        return await tier.write(key(number), memory.address, block_bytes, checksum(bytes_of(number)))

    async def whole(number: int) -> bool:
        (found,) = await tier.read_many([(key(number), memory.address)])
        return not isinstance(found, Exception) and bytes(memory.view(0, block_bytes)) == bytes_of(number)

    taken = [number for number in range(120) if await put(number)]
    assert 60 < len(taken) < 120 and not tier.table.may_grow
    assert tier.health.state == DiskState.OK
    held = [number for number in taken if tier.contains(key(number))]
    assert len(held) > 50 and all([await whole(number) for number in held])
    small_disk.grow()
    tier.table.may_grow = True
    segments = tier.files.n_open
    async with asyncio.timeout(60):
        number = 2000
        while tier.files.n_open == segments:
            await put(number)
            number += 1
    check_table(tier.table)
    tier.close()
    assert not [target for _, target in open_files() if target.startswith(str(small_disk.directory))]


def test_a_disk_budget_refuses_writes_beyond_it(tmp_path: Path) -> None:
    io = BudgetIo(tmp_path)
    io.lock_directory(tmp_path)
    fds = [io.open(tmp_path / f"segment-{number:06}", create=True) for number in range(2)]
    io.fallocate(fds[0], SMALL_BYTES - PAGE_BYTES)
    with pytest.raises(OSError, match="No space left"):
        io.fallocate(fds[1], 2 * PAGE_BYTES)
    io.fallocate(fds[1], PAGE_BYTES)
    for fd in fds:
        io.close(fd)
