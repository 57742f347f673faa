"""The tier of one disk: blocks in preallocated segment files, verified on every read.

Nothing here fails a request. A block that cannot be read or does not verify is dropped and is a miss. A
disk that fails writes takes no more blocks, one that hangs, is too slow, fails reads or cannot be opened is
away, until a probe finds it well again (`disk/watch.py`). A full disk stays at the segments it has. A
segment whose sync failed is never trusted again: all its blocks are dropped, and the file is removed. The
index is rebuilt from the headers, and a payload is only believed when its checksum is right, whatever a
crash left there.

The table is used from the event loop only; files are read and written in small thread pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.disk.health import DiskHealth, DiskState
from services.kvstore.disk.native.reads import open_reader
from services.kvstore.disk.native.writes import open_writer
from services.kvstore.disk.opening import DiskOpener, tell_of_all
from services.kvstore.disk.policy import UNKNOWN, Origin
from services.kvstore.disk.queue import Ended, OnEnd
from services.kvstore.disk.reads import DiskReads, OnRead, ReadResult
from services.kvstore.disk.segments.files import BlockRead, BlockWrite, SegmentFiles
from services.kvstore.disk.segments.format import HEADER_BYTES, BlockHeader
from services.kvstore.disk.segments.io import DiskIo, SystemDiskIo
from services.kvstore.disk.segments.restore import OpenedDisk
from services.kvstore.disk.segments.segment_file import SyncFailed
from services.kvstore.disk.table.block import DiskBlock
from services.kvstore.disk.table.table import DiskTable
from services.kvstore.disk.watch import DiskWatch
from slipstream.errors import DataCorrupt, NotFound, Unavailable

log = logging.getLogger(__name__)

MAX_SEGMENT_FILE_BYTES = 64 << 20
FULL_RETRY_S = 5.0
CLOSE_WAIT_S = 10.0
FIRST_BLOCKS = 4  # of many that are wanted together
HUNG_WAIT_S = 0.5  # for a disk that is not well
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def segment_bytes_for(disk_bytes: int) -> int:
    """Bytes of a segment beside its superblock. At least 8 segments, so that the room of one block size
    can go to another."""
    return max(0, min(MAX_SEGMENT_FILE_BYTES, disk_bytes // 8 // PAGE_BYTES * PAGE_BYTES) - HEADER_BYTES)


class DiskTier:
    """Blocks on one disk, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        disk_bytes: int,
        tenant_share: float = 1.0,
        io: DiskIo | None = None,
        health: DiskHealth | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._segment_bytes = segment_bytes_for(disk_bytes)
        self._n_segments = disk_bytes // (self._segment_bytes + HEADER_BYTES) if self._segment_bytes else 0
        self._tenant_share = tenant_share
        self.directory = directory
        self.table = self._new_table()
        self.files = SegmentFiles(directory, segment_bytes=self._segment_bytes, io=io or SystemDiskIo())
        self._clock_s = clock_s
        self.watch = DiskWatch(
            str(directory), health or DiskHealth(), self, probe=self._probe, clock_s=clock_s
        )
        self._reads = open_reader(self.files, clock_s)
        self._writes = open_writer(self.files, clock_s)
        self._side_thread = ThreadPoolExecutor(1, thread_name_prefix="kv-side")  # probes, scrubs, erasures
        self._opener = DiskOpener(self.files, self._new_table, clock_s=clock_s)
        self._generation = 0
        self._writing: set[bytes] = set()
        self._retired: set[int] = set()
        self.on_lost: Callable[[Sequence[bytes]], None] = lambda keys: None
        self.corrupt_blocks = 0
        self.scrubbed_blocks = 0
        self.reads_ended = 0

    @property
    def health(self) -> DiskHealth:
        """What the disk is good for."""
        return self.watch.health

    @property
    def io_errors(self) -> int:
        """Reads and writes that the disk failed."""
        return self.watch.io_errors

    @property
    def busy(self) -> bool:
        """Whether reads or writes run or wait."""
        return bool(len(self._reads) or len(self._writes))

    @property
    def reclaims(self) -> bool:
        """Whether segments that were given up can be removed."""
        return bool(self._quiet_retired())

    def running_since_s(self) -> tuple[float | None, float | None]:
        """When the oldest running read and write began."""
        return self._reads.running_since_s, self._writes.running_since_s

    @property
    def read_only(self) -> bool:
        """Whether it takes no blocks now."""
        return self.health.state != DiskState.OK

    @property
    def away(self) -> bool:
        """Whether its blocks are misses now."""
        return self.health.state == DiskState.AWAY

    @property
    def n_syncs(self) -> int:
        """How often a segment was synced for a group of blocks."""
        return self.files.n_syncs

    @property
    def n_writing(self) -> int:
        """Blocks on their way to the disk."""
        return len(self._writing)

    def open(self) -> None:
        """Take the directory and rebuild the index from what is there. Blocking; before any use.

        A disk that fails it is away until it can be opened. Raises FailedPrecondition when the directory
        cannot be used or another process has it.
        """
        try:
            self._opened(self._opener.load(self.table))
        except OSError as error:
            self.watch.open_failed(error)

    async def open_soon(self) -> None:
        """As `open`, without blocking; a disk that hangs is away, and taken in when it answers."""
        opening = asyncio.ensure_future(self._open_late())
        if not await self._opener.wait_patiently(opening):
            self.watch.open_hangs(opening)
            return
        try:
            opening.result()
        except OSError as error:
            self.watch.open_failed(error)

    def start(self) -> None:
        """Look after a disk that was not well when it was opened; needs a running loop."""
        self.watch.keep_ticking()

    def contains(self, key: bytes) -> bool:
        """Whether a block is indexed. It may still turn out not to verify."""
        return not self.away and self.table.contains(key)

    async def read_many(
        self, wanted: Sequence[tuple[bytes, int]], *, told: OnRead | None = None
    ) -> list[ReadResult]:
        """Read blocks into memory at their addresses, which have room for their page-rounded lengths.

        Gives each one's length and payload checksum, verified, or why it cannot be had: NotFound,
        DataCorrupt, Unavailable. `told` hears of each that is there as soon as it ended, by its position.
        Must not be cancelled: the memory is written to until this returns.
        """
        async with DiskReads(wanted, NotFound("no such block"), told) as reads:
            if not self.away:
                # The disk begins with the first few while the others are looked up.
                few, others = wanted[:FIRST_BLOCKS], wanted[FIRST_BLOCKS:]
                self._begin_found(reads, 0, [self.table.get(key) for key, _ in few])
                if others:
                    self._begin_found(reads, len(few), self.table.get_many([key for key, _ in others]))
        return reads.results

    def _begin_found(self, reads: DiskReads, first: int, blocks: Sequence[DiskBlock | None]) -> None:
        items, positions = reads.found(first, blocks)
        if items:
            self._begin_reads(
                items, lambda at, error: reads.end(positions[at], self._ended(items[at], error))
            )

    def _begin_reads(self, items: Sequence[BlockRead], on_end: OnEnd) -> None:
        """Hold the blocks and read them; when that cannot begin, each ends as Unavailable."""
        self.watch.keep_ticking()
        for item in items:
            self.table.hold(item.block)
        try:
            self._reads.add(items, on_end)
        except Exception as error:
            log.exception("disk tier: reads of %s cannot begin", self.directory)
            gone = error if isinstance(error, Unavailable) else Unavailable(f"no reads of the disk: {error}")
            for position in range(len(items)):
                on_end(position, gone)

    def _ended(self, read: BlockRead, error: Exception | None) -> ReadResult:
        """What a read gave; a block that cannot be had is dropped."""
        block = read.block
        self.table.unhold(block)
        self.reads_ended += 1
        if error is None:
            self.watch.read_ended()
            return block.n_bytes, block.checksum
        if isinstance(error, DataCorrupt):
            self.watch.read_ended()
            log.warning("disk tier: block %s in %s does not verify", block.key.hex(), self.directory)
            self.corrupt_blocks += self._drop_and_erase(block) is not None
            return error
        if isinstance(error, Unavailable):
            return error
        self.table.drop(block)
        self.watch.failed("read", error)
        return Unavailable(f"the disk failed a read: {error}")

    async def write(
        self, key: bytes, address: int, n_bytes: int, checksum: bytes, origin: Origin = UNKNOWN
    ) -> bool:
        """Write the block at `address` and publish it once synced; False when the tier did not take it.

        After True the block is durable: a crash does not take it. The memory up to the page-rounded
        length must stay as it is until this returns, so this must not be cancelled either.
        """
        if self.read_only or key in self._writing or self.table.contains(key):
            return False
        slot = self.table.allocate(n_bytes, generation=self._generation, tenant=origin.tenant)
        if slot is None:
            return False
        self._generation += 1
        header = BlockHeader(key, n_bytes, self._generation, checksum)
        cut_generation = self.table.slabs[slot.slab].cut_generation
        published = False
        self._writing.add(key)
        try:
            self.watch.keep_ticking()
            ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
            write = BlockWrite(header, slot, cut_generation, address)
            self._writes.add((write,), lambda _, error: None if ended.done() else ended.set_result(error))
            error = await ended
            if error is None and not self.table.slabs[slot.slab].retired:
                self.table.publish(key, slot, n_bytes, header.generation, checksum, origin)
                published = True
        finally:
            self._writing.remove(key)
            if not published:
                self.table.free(slot)
        if error is not None:
            self._write_failed(slot.slab, error)
        return published

    async def verify(self, block: DiskBlock) -> bool:
        """Compare a block on the disk with the index; a corrupt one is dropped. Raises Unavailable."""
        self.table.hold(block)
        try:
            loop = asyncio.get_running_loop()
            whole = await loop.run_in_executor(self._side_thread, self.files.verify, block)
        except OSError as error:
            self.watch.failed("read", error)
            raise Unavailable(f"the disk failed a read: {error}") from error
        finally:
            self.table.unhold(block)
        self.scrubbed_blocks += 1
        if not whole and self.table.drop(block):
            self.corrupt_blocks += 1
        return whole

    async def forget(self, block: DiskBlock) -> bool:
        """Drop a block and erase its header, so that no start finds it; False when it was gone."""
        erased = self._drop_and_erase(block)
        if erased is not None:
            await asyncio.shield(erased)
        return erased is not None

    def _drop_and_erase(self, block: DiskBlock) -> asyncio.Future[None] | None:
        """The block is gone at once, its header soon; None when the block was gone."""
        self.table.hold(block)  # nobody gets its slot before the header is erased
        if not self.table.drop(block):
            self.table.unhold(block)
            return None
        loop = asyncio.get_running_loop()
        try:
            erased = loop.run_in_executor(self._side_thread, self.files.erase, block)
        except RuntimeError:  # closed: as after an error of the disk, the next start finds the header
            erased = loop.create_future()
            erased.set_result(None)
        erased.add_done_callback(lambda _: self.table.unhold(block))
        return erased

    def close(self) -> None:
        """Close the files, after what runs has ended. Blocking. Idempotent.

        When a call hangs beyond CLOSE_WAIT_S, or hung already, the files stay open: it may still use them.
        """
        self.watch.close()
        give_up_at = time.monotonic() + (CLOSE_WAIT_S if self.health.state == DiskState.OK else HUNG_WAIT_S)
        pools = (self._reads, self._writes)
        while any(p.running_since_s is not None for p in pools) and time.monotonic() < give_up_at:
            threading.Event().wait(0.01)
        quiet = all(pool.running_since_s is None for pool in pools) and self._side_is_quiet(give_up_at)
        for queue in pools:
            queue.close(wait=quiet)
        self._side_thread.shutdown(wait=quiet)
        if not quiet:
            log.error("disk tier: %s hangs; its files stay open", self.directory)
            return
        self.files.close()
        self._opener.close()

    def _side_is_quiet(self, give_up_at: float) -> bool:
        if self._opener.runs:
            return False
        with contextlib.suppress(RuntimeError):  # it was closed before
            last = self._side_thread.submit(int)
            return not wait((last,), timeout=max(0.0, give_up_at - time.monotonic())).not_done
        return True

    def _write_failed(self, slab: int, error: Exception) -> None:
        # Without a published block the segment was to be made, or never got room; else it is kept.
        full = isinstance(error, OSError) and error.errno in _FULL and not self.table.slabs[slab].published
        if full:
            if self.table.may_grow:
                log.warning("disk tier: no room for another segment in %s", self.directory)
            self.table.may_grow = False
            asyncio.get_running_loop().call_later(FULL_RETRY_S, self._try_growing)
        elif not isinstance(error, Unavailable):
            self.watch.failed("write", error)
        if (full or isinstance(error, SyncFailed)) and slab not in self._retired:
            self._retired.add(slab)
            if lost := self.table.retire(slab):
                self.on_lost(lost)

    def _try_growing(self) -> None:
        self.table.may_grow = True

    def _quiet_retired(self) -> list[int]:
        return [slab for slab in self._retired if not self.table.slabs[slab].taken]

    def give_up_waiting(self) -> None:
        """The disk is away: what it has not begun is not done."""
        gone = Unavailable(f"{self.directory} is away")
        self._reads.give_up_waiting(gone)
        self._writes.give_up_waiting(gone)

    async def _probe(self) -> None:
        """See whether the disk does what it should, and reclaim the segments that were given up; open it
        if that was not possible before. Raises OSError."""
        loop = asyncio.get_running_loop()
        if not self._opener.opened:
            await self._open_late()
        await loop.run_in_executor(self._side_thread, self.files.probe)
        for slab in self._quiet_retired():
            await loop.run_in_executor(self._side_thread, self.files.remove, slab)
            self.table.revive(slab)
            self._retired.remove(slab)

    async def _open_late(self) -> None:
        """Open a disk while the node runs. Raises OSError, FailedPrecondition."""
        found = await self._opener.load_in_thread(self._opened)
        found.on_change, self.table = self.table.on_change, found
        await tell_of_all(found)

    def _opened(self, found: OpenedDisk) -> None:
        self._generation = found.generation
        if found.write_error is not None:
            log.warning("disk tier: %s takes no blocks for now: %s", self.directory, found.write_error)
            self.health.write_failed(now_s=self._clock_s())

    def _new_table(self) -> DiskTable:
        return DiskTable(
            n_slabs=self._n_segments, slab_bytes=self._segment_bytes, tenant_share=self._tenant_share
        )
