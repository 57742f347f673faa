"""The disk tier: blocks in preallocated segment files, verified on every read.

Nothing here fails a request. A block that cannot be read or does not verify is dropped and is a miss.
A failed write makes the tier read-only; a full disk keeps it at the segments it has; a segment whose
sync failed is never trusted again. The index is rebuilt from the headers at start, and a payload is
only believed when its digest is right, whatever a crash left there.

The index is used from the event loop only; files are read and written in a small thread pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from libs.common.checksum import memory_at
from libs.common.errors import DataCorrupt, FailedPrecondition, NotFound, Unavailable
from libs.common.registered_memory import PAGE_BYTES, page_rounded
from services.kvstore.disk_format import HEADER_BYTES, BlockHeader, Superblock
from services.kvstore.segment_file import DiskIo, SegmentFile, SyncFailed, SystemDiskIo
from services.kvstore.slots import Block, Slot, SlotTable

log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 64 << 20
THREADS = 4
ResultT = TypeVar("ResultT")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def segment_bytes_for(disk_bytes: int) -> int:
    """At least 8 segments, so that the room of one block size can go to another."""
    return min(MAX_SEGMENT_BYTES, disk_bytes // 8 // PAGE_BYTES * PAGE_BYTES)


class DiskTier:
    """Blocks on one disk, in a directory of its own. The value of a block is its generation."""

    def __init__(self, directory: Path, *, disk_bytes: int, io: DiskIo | None = None) -> None:
        self._directory = directory
        self._io: DiskIo = io or SystemDiskIo()
        segment_bytes = segment_bytes_for(disk_bytes)
        n_segments = disk_bytes // (segment_bytes + HEADER_BYTES) if segment_bytes else 0
        self.table: SlotTable[int] = SlotTable(
            n_slabs=n_segments, slab_bytes=segment_bytes, overhead_bytes=HEADER_BYTES
        )
        self._files: dict[int, SegmentFile] = {}
        self._files_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-disk")
        self._generation = 0
        self._writing: set[bytes] = set()
        self._lock_fd = -1
        self.read_only = False
        self.corrupt_blocks = 0
        self.io_errors = 0

    def open(self) -> None:
        """Take the directory and rebuild the index from what is there. Blocking; before any use.

        Raises FailedPrecondition when the directory cannot be used or another process has it.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self._directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(f"{self._directory} is in use by another process") from None
        except OSError as error:
            raise FailedPrecondition(f"{self._directory} is not writable: {error}") from None
        found: list[tuple[BlockHeader, Slot]] = []
        for path in sorted(self._directory.glob("segment-*")):
            found.extend(self._restore(path))
        # Oldest first, so that the newest are the most recent; of two with one key the newer stays.
        for header, slot in sorted(found, key=lambda each: each[0].generation):
            older = self.table.get(header.key)
            if older is not None:
                self.table.drop(older)
            self.table.publish(header.key, slot, header.n_bytes, header.generation)
            self._generation = max(self._generation, header.generation)
        log.info("disk tier: %d blocks found in %s", self.table.n_blocks, self._directory)

    def contains(self, key: bytes) -> bool:
        """Whether a block is indexed. It may still turn out not to verify."""
        return self.table.get(key) is not None

    async def read(self, key: bytes, address: int) -> tuple[int, bytes]:
        """Read a block into memory at `address`, which has room for its page-rounded length.

        Returns its length and payload checksum, after the digest was verified. Raises NotFound,
        DataCorrupt, Unavailable; the block is dropped then. Must not be cancelled: the memory is
        written to until this returns.
        """
        block = self.table.get(key)
        if block is None:
            raise NotFound("no such block")
        self.table.hold(block)
        try:
            header = await self._in_thread(self._read, block, address)
        except (DataCorrupt, OSError) as error:
            self.table.drop(block)
            if isinstance(error, DataCorrupt):
                self.corrupt_blocks += 1
                raise
            self._fail("read", error)
            raise Unavailable(f"the disk failed a read: {error}") from error
        finally:
            self.table.unhold(block)
        return header.n_bytes, header.checksum

    async def write(self, key: bytes, address: int, n_bytes: int, checksum: bytes) -> bool:
        """Write the block at `address` and publish it once synced; False when the tier did not take it.

        The memory up to the page-rounded length must stay as it is until this returns, so this must not
        be cancelled either.
        """
        if self.read_only or self.contains(key) or key in self._writing:
            return False
        slot = self.table.allocate(n_bytes)
        if slot is None:
            return False
        self._writing.add(key)
        self._generation += 1
        header = BlockHeader(key, n_bytes, self._generation, checksum)
        try:
            await self._in_thread(self._write, slot, header, address)
        except (SyncFailed, OSError) as error:
            full = isinstance(error, OSError) and error.errno in _FULL
            if full or isinstance(error, SyncFailed):
                self.table.retire(slot.slab)
            if full:
                log.warning("disk tier: no room for segment %d, going on with what there is", slot.slab)
            else:
                self._fail("write", error)
            self.table.free(slot)
            return False
        except Exception:
            self.table.free(slot)
            raise
        finally:
            self._writing.remove(key)
        self.table.publish(key, slot, n_bytes, header.generation)
        return True

    def close(self) -> None:
        """Close the files, after what runs has ended. Blocking. Idempotent."""
        self._threads.shutdown(wait=True)
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _restore(self, path: Path) -> list[tuple[BlockHeader, Slot]]:
        """Blocks of one segment file; a file that does not fit the configuration is removed."""
        try:
            file = SegmentFile.open(path, self._io)
            if file is None or not self._fits(path, file.superblock):
                log.warning("disk tier: removing %s, which does not fit", path.name)
                if file is not None:
                    file.close()
                path.unlink()
                return []
            number, slot_bytes = file.superblock.number, file.superblock.slot_bytes
            headers = list(file.headers(self.table.slots_per_slab(slot_bytes)))
        except OSError as error:
            log.warning("disk tier: cannot read %s: %s", path.name, error)
            return []
        self._files[number] = file
        found = []
        for header, slot in zip(headers, self.table.restore(number, slot_bytes), strict=True):
            if header is not None and header.n_bytes > 0 and page_rounded(header.n_bytes) == slot_bytes:
                found.append((header, slot))
            else:
                self.table.free(slot)
        return found

    def _fits(self, path: Path, superblock: Superblock) -> bool:
        return (
            path == self._path(superblock.number)
            and superblock.number < self.table.n_slabs
            and superblock.segment_bytes == self.table.slab_bytes
            and superblock.slot_bytes % PAGE_BYTES == 0
            and self.table.slots_per_slab(superblock.slot_bytes) > 0
        )

    def _path(self, number: int) -> Path:
        return self._directory / f"segment-{number:06d}"

    def _read(self, block: Block[int], address: int) -> BlockHeader:
        payload = memory_at(address, block.slot.slot_bytes)
        file = self._files[block.slot.slab]
        header = file.read(block.slot.index, payload)
        if (
            header is None
            or (header.key, header.n_bytes, header.generation) != (block.key, block.n_bytes, block.value)
            or header.digest_over(payload[: block.n_bytes]) != header.digest
        ):
            log.warning("disk tier: block %s does not verify", block.key.hex())
            with contextlib.suppress(OSError, SyncFailed):
                file.write_header(block.slot.index, bytes(HEADER_BYTES))  # not to be found again
            raise DataCorrupt(f"block {block.key.hex()} on disk does not verify")
        return header

    def _write(self, slot: Slot, header: BlockHeader, address: int) -> None:
        payload = memory_at(address, slot.slot_bytes)
        file = self._file_for(slot)
        file.write(slot.index, header.pack(payload[: header.n_bytes]), payload)

    def _file_for(self, slot: Slot) -> SegmentFile:
        """The segment's file, cut for the slot's size: created, or created anew in place of the old."""
        with self._files_lock:
            file = self._files.get(slot.slab)
            if file is None or file.superblock.slot_bytes != slot.slot_bytes:
                if file is not None:  # nobody reads or writes it: the table has let all its slots go
                    del self._files[slot.slab]
                    file.close()
                    file.path.unlink(missing_ok=True)
                superblock = Superblock(slot.slab, self.table.slab_bytes, slot.slot_bytes)
                file = self._files[slot.slab] = SegmentFile.create(
                    self._path(slot.slab), superblock, self._io
                )
            return file

    def _fail(self, what: str, error: BaseException) -> None:
        self.io_errors += 1
        if not self.read_only:
            self.read_only = True
            log.error("disk tier: a %s failed, taking no more blocks: %s", what, error)

    async def _in_thread(self, call: Callable[..., ResultT], *args: object) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
