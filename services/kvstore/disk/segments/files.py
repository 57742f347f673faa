"""The segment files of one disk: created, cut, read with verification, written in groups. Blocking.

A group becomes durable in four steps: all payloads, a sync of each file, all headers, a sync of each file.
So a header on the disk proves that its payload is there, and two syncs serve many blocks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from libs.common.checksum import UNKEYED, KvChecksum, memory_at
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.disk.segment_format import BlockHeader, FoundHeaders, Superblock
from services.kvstore.disk.segments.io import DiskIo
from services.kvstore.disk.segments.segment_file import SCAN_BYTES, BufferPool, SegmentFile, SyncFailed
from services.kvstore.disk.table.block import DiskBlock
from services.kvstore.dram.slots import Slot
from slipstream.errors import DataCorrupt

log = logging.getLogger(__name__)

# Largest run of neighbours that one call reads or writes.
MAX_RUN_BYTES = 1 << 20
PROBE_NAME = "probe"


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A block to read into memory at `address`, which has room for its slot."""

    block: DiskBlock
    address: int

    @property
    def slot(self) -> Slot:
        """The block's slot."""
        return self.block.slot


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """A block to write from memory at `address`; the slot was cut after `cut_generation`."""

    header: BlockHeader
    slot: Slot
    cut_generation: int
    address: int


class SegmentFiles:
    """All segments of one directory."""

    def __init__(
        self, directory: Path, *, segment_bytes: int, io: DiskIo, checksum: KvChecksum = UNKEYED
    ) -> None:
        self.directory = directory
        self.io = io
        self.checksum = checksum
        self.pool = BufferPool()
        self._segment_bytes = segment_bytes
        self.n_syncs = 0  # for groups
        self._files: dict[int, SegmentFile] = {}
        self._lock = threading.Lock()

    @property
    def n_open(self) -> int:
        """Number of open segment files."""
        return len(self._files)

    def restore(self, path: Path, *, n_segments: int) -> tuple[Superblock, FoundHeaders] | None:
        """The superblock and the headers of a segment found at start; None if it is unusable.

        Removes a segment that does not fit the configuration.
        """
        try:
            file = SegmentFile.open(path, self.io, self.pool)
            if file is None or not self._fits(path, file.superblock, n_segments):
                log.warning("disk tier: removing %s, which does not fit", path)
                if file is not None:
                    file.close()
                self.io.unlink(path)
                return None
            try:
                found = file.scan()
            except BaseException:
                file.close()
                raise
        except OSError as error:
            log.warning("disk tier: cannot read %s: %s", path, error)
            return None
        with self._lock:
            self._files[file.superblock.number] = file
        return file.superblock, found

    def load(self, run: Sequence[BlockRead]) -> list[OSError | DataCorrupt | None]:
        """Read blocks of neighbouring slots and verify them; returns each one's error or None."""
        first = run[0].slot
        payloads = [memory_at(each.address, first.slot_bytes) for each in run]
        file = self._files[first.slab]
        try:
            file.read(first.index, payloads)
        except OSError as error:
            if len(run) == 1:
                return [error]
            return [
                outcome for each in run for outcome in self.load([each])
            ]  # one by one, to find the bad ones
        return [self._verified(each.block, payload) for each, payload in zip(run, payloads, strict=True)]

    def _verified(self, block: DiskBlock, payload: memoryview) -> DataCorrupt | None:
        if self.checksum.of(payload[: block.n_bytes]) == block.checksum:
            return None
        return DataCorrupt(f"block {block.key.hex()} on disk does not verify")

    def file(self, number: int) -> SegmentFile:
        """The open segment; it stays open while one of its slots is held or written."""
        return self._files[number]

    def verify(self, block: DiskBlock) -> bool:
        """Whether header and payload on the disk match the index. Erases a damaged block. Raises OSError."""
        file, slot = self._files[block.slot.slab], block.slot
        expected = BlockHeader(block.key, block.n_bytes, block.generation, block.checksum)
        whole = file.read_header(slot.index) == expected
        if whole:
            state = self.checksum.stream()
            with self.pool.borrow() as buffer:
                for start in range(0, slot.slot_bytes, SCAN_BYTES):
                    view = buffer.view(0, min(SCAN_BYTES, slot.slot_bytes - start))
                    file.read_part(slot.index, start, view)
                    state.update(view[: max(0, block.n_bytes - start)])
            whole = state.digest() == block.checksum
        if not whole:
            log.warning("disk tier: block %s in %s does not verify", block.key.hex(), file.path)
            self.erase(block)
        return whole

    def erase(self, block: DiskBlock) -> None:
        """Erase a block's header, unsynced, so that the next start does not find the block."""
        with contextlib.suppress(OSError):
            self._files[block.slot.slab].write_headers(block.slot.index, [b""])

    def are_ready(self, group: Sequence[BlockWrite]) -> bool:
        """Whether the segments of all these blocks exist and are cut for them."""
        for slab in {write.slot.slab: write for write in group}.values():
            file = self._files.get(slab.slot.slab)
            if file is None or file.superblock != self._superblock(slab):
                return False
        return True

    def make_ready(self, group: Sequence[BlockWrite]) -> dict[int, Exception]:
        """Create or cut the segments of these blocks where needed; returns the errors by segment."""
        failed: dict[int, Exception] = {}
        for write in {write.slot.slab: write for write in group}.values():
            try:
                self._file_for(write)
            except (OSError, SyncFailed) as error:
                failed[write.slot.slab] = error
        return failed

    def write_group(self, group: Sequence[BlockWrite], executor: Executor) -> list[Exception | None]:
        """Make the blocks durable, in parallel on `executor`; returns each one's error or None."""
        outcome: dict[Slot, Exception] = {}
        for slab, error in self.make_ready(group).items():
            _fail_segment(slab, error, group, outcome)
        self._write_runs(group, outcome, _write_payloads, MAX_RUN_BYTES, executor)
        self._sync(group, outcome, executor)
        self._write_runs(group, outcome, _write_headers, self._segment_bytes, None)
        self._sync(group, outcome, executor)
        return [outcome.get(write.slot) for write in group]

    def remove(self, number: int) -> None:
        """Close and remove a segment without users. Raises OSError."""
        with self._lock:
            file = self._files.get(number)
            if file is not None:
                self.io.unlink(file.path)
                del self._files[number]
                file.close()

    def probe(self) -> None:
        """Write, sync and read back a page. Raises OSError when the disk fails that."""
        path = self.directory / PROBE_NAME
        fd = self.io.open(path, create=True)
        try:
            with self.pool.borrow() as buffer:
                page = buffer.view(0, PAGE_BYTES)
                page[:] = b"\x5a" * PAGE_BYTES
                if self.io.pwritev(fd, [page], 0) != PAGE_BYTES:
                    raise OSError("a short write")
                self.io.fdatasync(fd)
                page[:] = bytes(PAGE_BYTES)
                if self.io.preadv(fd, [page], 0) != PAGE_BYTES or page[-1] != 0x5A:
                    raise OSError("not what was written")
        finally:
            self.io.close(fd)
            with contextlib.suppress(OSError):
                self.io.unlink(path)

    def close(self) -> None:
        """Close all files. No call may use them any more."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def path(self, number: int) -> Path:
        """The path of segment `number`."""
        return self.directory / f"segment-{number:06d}"

    def _fits(self, path: Path, superblock: Superblock, n_segments: int) -> bool:
        return (
            path == self.path(superblock.number)
            and superblock.number < n_segments
            and superblock.segment_bytes == self._segment_bytes
            and superblock.slot_bytes % PAGE_BYTES == 0
            and superblock.slot_bytes > 0
            and superblock.n_slots > 0
        )

    def _superblock(self, write: BlockWrite) -> Superblock:
        """The superblock that the block's segment needs."""
        return Superblock(write.slot.slab, self._segment_bytes, write.slot.slot_bytes, write.cut_generation)

    def _file_for(self, write: BlockWrite) -> SegmentFile:
        """The segment's file, cut as the slot needs it: unchanged, cut again, or created."""
        number = write.slot.slab
        with self._lock:
            file = self._files.get(number)
            superblock = self._superblock(write)
            if file is None:
                file = SegmentFile.create(self.path(number), superblock, self.io, self.pool)
                self._files[number] = file
            elif file.superblock != superblock:
                file.cut(superblock)  # without users: the table has freed all its slots
            return file

    def _write_runs(
        self,
        group: Sequence[BlockWrite],
        outcome: dict[Slot, Exception],
        step: Callable[[SegmentFile, list[BlockWrite]], None],
        max_bytes: int,
        executor: Executor | None,
    ) -> None:
        going = sorted((write for write in group if write.slot not in outcome), key=_location)
        runs = list(neighbours(going, max_bytes))

        def write_run(run: list[BlockWrite]) -> None:
            try:
                step(self._files[run[0].slot.slab], run)
            except OSError as error:
                outcome.update((write.slot, error) for write in run)

        if executor is None or len(runs) < 2:
            for run in runs:
                write_run(run)
        else:
            list(executor.map(write_run, runs))

    def _sync(self, group: Sequence[BlockWrite], outcome: dict[Slot, Exception], executor: Executor) -> None:
        slabs = list({write.slot.slab for write in group if write.slot not in outcome})

        def sync(slab: int) -> SyncFailed | None:
            try:
                self._files[slab].sync()
            except SyncFailed as error:
                return error
            return None

        with self._lock:
            self.n_syncs += len(slabs)
        # Concurrent syncs of files on one filesystem share their cost.
        found = list(executor.map(sync, slabs)) if len(slabs) > 1 else [sync(slab) for slab in slabs]
        for slab, error in zip(slabs, found, strict=True):
            if error is not None:
                _fail_segment(slab, error, group, outcome)


def neighbours(items: Sequence[BlockWrite], max_bytes: int) -> Iterator[list[BlockWrite]]:
    """Runs of neighbouring slots, each of at most `max_bytes` or one block."""
    run: list[BlockWrite] = []
    for item in items:
        if run and not follows(run[-1].slot, item.slot, len(run), max_bytes):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def follows(slot: Slot, following: Slot, n_before: int, max_bytes: int = MAX_RUN_BYTES) -> bool:
    """Whether `following` is the next slot on the disk and fits a run of `n_before` slots."""
    return (
        slot.index + 1 == following.index
        and (slot.slab, slot.slot_bytes) == (following.slab, following.slot_bytes)
        and (n_before + 1) * slot.slot_bytes <= max_bytes
    )


def _fail_segment(
    slab: int, error: Exception, group: Sequence[BlockWrite], outcome: dict[Slot, Exception]
) -> None:
    outcome.update((write.slot, error) for write in group if write.slot.slab == slab)


def _location(write: BlockWrite) -> tuple[int, int]:
    return write.slot.slab, write.slot.index


def _write_payloads(file: SegmentFile, run: list[BlockWrite]) -> None:
    slot = run[0].slot
    file.write(slot.index, [memory_at(write.address, slot.slot_bytes) for write in run])


def _write_headers(file: SegmentFile, run: list[BlockWrite]) -> None:
    file.write_headers(run[0].slot.index, [write.header.sealed() for write in run])
