"""The tier of one disk: blocks in preallocated segment files, verified on every read.

No error here fails a request. A block that cannot be read or does not verify is dropped and is a miss. A
disk that fails writes takes no more blocks. One that hangs, is too slow, fails reads or cannot be opened is
unavailable until a probe succeeds (`disk/watch.py`). A full disk keeps the segments it has. A segment whose
sync failed is never trusted again: the tier drops its blocks and removes the file. A restart rebuilds the
index from the headers, and verifies each payload by its checksum when it is read.

The table belongs to the event loop; small thread pools read and write the files.
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

from libs.common.checksum import UNKEYED, KvChecksum
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.disk.health import DiskHealth, DiskState
from services.kvstore.disk.native.reads import open_reader
from services.kvstore.disk.native.writes import open_writer
from services.kvstore.disk.opening import DiskOpener, publish_all
from services.kvstore.disk.queues.queue import Ended, OnEnd
from services.kvstore.disk.queues.reads import DiskReads, OnRead, ReadResult
from services.kvstore.disk.segment_format import HEADER_BYTES, BlockHeader
from services.kvstore.disk.segments.files import BlockRead, BlockWrite, SegmentFiles
from services.kvstore.disk.segments.io import DiskIo, SystemDiskIo
from services.kvstore.disk.segments.restore import OpenedDisk
from services.kvstore.disk.segments.segment_file import SyncFailed
from services.kvstore.disk.table.block import DiskBlock
from services.kvstore.disk.table.policy import UNKNOWN, BlockOrigin
from services.kvstore.disk.table.table import DiskTable
from services.kvstore.disk.watch import DiskListener, DiskWatch
from slipstream.errors import DataCorrupt, NotFound, Unavailable

log = logging.getLogger(__name__)

MAX_SEGMENT_FILE_BYTES = 64 << 20
FULL_RETRY_S = 5.0
CLOSE_WAIT_S = 10.0
FIRST_BLOCKS = 4  # of many blocks that one call reads
HUNG_WAIT_S = 0.5  # for a disk that is not OK
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def segment_bytes_for(disk_bytes: int) -> int:
    """Bytes of a segment without its superblock.

    A disk has at least 8 segments, so that one block size can take over the room of another.
    """
    return max(0, min(MAX_SEGMENT_FILE_BYTES, disk_bytes // 8 // PAGE_BYTES * PAGE_BYTES) - HEADER_BYTES)


class DiskTier:
    """Blocks on one disk, in its own directory."""

    def __init__(
        self,
        directory: Path,
        *,
        disk_bytes: int,
        tenant_share: float = 1.0,
        io: DiskIo | None = None,
        checksum: KvChecksum = UNKEYED,
        health: DiskHealth | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._segment_bytes = segment_bytes_for(disk_bytes)
        self._n_segments = disk_bytes // (self._segment_bytes + HEADER_BYTES) if self._segment_bytes else 0
        self._tenant_share = tenant_share
        self.directory = directory
        self.table = self._new_table()
        self.files = SegmentFiles(
            directory, segment_bytes=self._segment_bytes, io=io or SystemDiskIo(), checksum=checksum
        )
        self._clock_s = clock_s
        self.watch = DiskWatch(str(directory), health or DiskHealth(), self, clock_s=clock_s)
        self._reads = open_reader(self.files, clock_s)
        self._writes = open_writer(self.files, clock_s)
        self._side_thread = ThreadPoolExecutor(1, thread_name_prefix="kv-side")  # probes, scrubs, erasures
        self._opener = DiskOpener(self.files, self._new_table, clock_s=clock_s)
        self._generation = 0
        self._writing: set[bytes] = set()
        self._retired: set[int] = set()
        self.listeners: list[DiskListener] = []
        self.corrupt_blocks = 0
        self.scrubbed_blocks = 0
        self.reads_ended = 0

    @property
    def health(self) -> DiskHealth:
        """The disk's health."""
        return self.watch.health

    @property
    def io_errors(self) -> int:
        """Number of reads and writes that the disk failed."""
        return self.watch.io_errors

    @property
    def busy(self) -> bool:
        """Whether reads or writes run or wait."""
        return bool(len(self._reads) or len(self._writes))

    @property
    def can_reclaim(self) -> bool:
        """Whether retired segments can be removed."""
        return bool(self._reclaimable_segments())

    def running_since_s(self) -> tuple[float | None, float | None]:
        """When the oldest running read and write began."""
        return self._reads.running_since_s, self._writes.running_since_s

    @property
    def read_only(self) -> bool:
        """Whether the disk takes no blocks now."""
        return self.health.state != DiskState.OK

    @property
    def unavailable(self) -> bool:
        """Whether the disk's blocks are misses now."""
        return self.health.state == DiskState.UNAVAILABLE

    @property
    def n_syncs(self) -> int:
        """Number of segment syncs for groups of blocks."""
        return self.files.n_syncs

    @property
    def n_writing(self) -> int:
        """Number of blocks being written to the disk."""
        return len(self._writing)

    def open(self) -> None:
        """Lock the directory and rebuild the index. Blocking; called before any use.

        A disk that fails is unavailable until a probe opens it. Raises FailedPrecondition when the directory
        cannot be used or another process has locked it.
        """
        try:
            self._apply_opened(self._opener.load(self.table))
        except OSError as error:
            self.watch.open_failed(error)

    async def open_async(self) -> None:
        """Open like `open`, without blocking. A disk that hangs is unavailable until it answers."""
        opening = asyncio.ensure_future(self._open_in_thread())
        if not await self._opener.wait_with_progress(opening):
            self.watch.open_hangs(opening)
            return
        try:
            opening.result()
        except OSError as error:
            self.watch.open_failed(error)

    def start(self) -> None:
        """Start the watch of a disk that was not OK when it was opened; needs a running loop."""
        self.watch.schedule_tick()

    def contains(self, key: bytes) -> bool:
        """Whether a block is indexed. Its read may still find it damaged."""
        return not self.unavailable and self.table.contains(key)

    async def read_many(
        self, wanted: Sequence[tuple[bytes, int]], *, on_read: OnRead | None = None
    ) -> list[ReadResult]:
        """Read blocks to their addresses, which have room for their page-rounded lengths.

        Returns each one's length and payload checksum, verified, or its error: NotFound, DataCorrupt,
        Unavailable. `on_read` receives each result at once, with its position. Must not be cancelled: the
        disk may write to the memory until this returns.
        """
        async with DiskReads(wanted, NotFound("no such block"), on_read) as reads:
            if not self.unavailable:
                # The disk starts with the first few while the rest is looked up.
                few, others = wanted[:FIRST_BLOCKS], wanted[FIRST_BLOCKS:]
                self._begin_found(reads, 0, [self.table.get(key) for key, _ in few])
                if others:
                    self._begin_found(reads, len(few), self.table.get_many([key for key, _ in others]))
        return reads.results

    def _begin_found(self, reads: DiskReads, first: int, blocks: Sequence[DiskBlock | None]) -> None:
        items, positions = reads.found(first, blocks)
        if items:
            self._begin_reads(
                items, lambda at, error: reads.end(positions[at], self._read_result(items[at], error))
            )

    def _begin_reads(self, items: Sequence[BlockRead], on_end: OnEnd) -> None:
        """Hold the blocks and start their reads; on failure each ends as Unavailable."""
        self.watch.schedule_tick()
        for item in items:
            self.table.hold(item.block)
        try:
            self._reads.add(items, on_end)
        except Exception as error:
            log.exception("disk tier: reads of %s cannot begin", self.directory)
            gone = error if isinstance(error, Unavailable) else Unavailable(f"no reads of the disk: {error}")
            for position in range(len(items)):
                on_end(position, gone)

    def _read_result(self, read: BlockRead, error: Exception | None) -> ReadResult:
        """The result of a read; a block that cannot be read is dropped."""
        block = read.block
        self.table.unhold(block)
        self.reads_ended += 1
        if error is None:
            self.watch.record_read()
            return block.n_bytes, block.checksum
        if isinstance(error, DataCorrupt):
            self.watch.record_read()
            log.warning("disk tier: block %s in %s does not verify", block.key.hex(), self.directory)
            self.corrupt_blocks += self._drop_and_erase(block) is not None
            return error
        if isinstance(error, Unavailable):
            return error
        self.table.drop(block)
        self.watch.record_error("read", error)
        return Unavailable(f"the disk failed a read: {error}")

    async def write(
        self, key: bytes, address: int, n_bytes: int, checksum: bytes, origin: BlockOrigin = UNKNOWN
    ) -> bool:
        """Write the block at `address` and publish it once synced; False if the tier did not take it.

        After True the block survives a crash. Must not be cancelled: the memory up to the page-rounded length
        must stay unchanged until this returns.
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
            self.watch.schedule_tick()
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
        """Compare a block on the disk with the index; drops a damaged one. Raises Unavailable."""
        self.table.hold(block)
        try:
            loop = asyncio.get_running_loop()
            whole = await loop.run_in_executor(self._side_thread, self.files.verify, block)
        except OSError as error:
            self.watch.record_error("read", error)
            raise Unavailable(f"the disk failed a read: {error}") from error
        finally:
            self.table.unhold(block)
        self.scrubbed_blocks += 1
        if not whole and self.table.drop(block):
            self.corrupt_blocks += 1
        return whole

    async def drop(self, block: DiskBlock) -> bool:
        """Drop a block and erase its header, so that no restart finds it; False if it was gone."""
        erased = self._drop_and_erase(block)
        if erased is not None:
            await asyncio.shield(erased)
        return erased is not None

    def _drop_and_erase(self, block: DiskBlock) -> asyncio.Future[None] | None:
        """Drop the block now and erase its header soon; None if the block was gone."""
        self.table.hold(block)  # keeps the slot from reuse until the header is erased
        if not self.table.drop(block):
            self.table.unhold(block)
            return None
        loop = asyncio.get_running_loop()
        try:
            erased = loop.run_in_executor(self._side_thread, self.files.erase, block)
        except RuntimeError:  # closed: as after a disk error, the next start finds the header
            erased = loop.create_future()
            erased.set_result(None)
        erased.add_done_callback(lambda _: self.table.unhold(block))
        return erased

    def close(self) -> None:
        """Close the files after the running calls. Blocking. Idempotent.

        If a call hangs beyond CLOSE_WAIT_S the files stay open, since it may still use them.
        """
        self.watch.close()
        deadline_s = time.monotonic() + (CLOSE_WAIT_S if self.health.state == DiskState.OK else HUNG_WAIT_S)
        pools = (self._reads, self._writes)
        while any(p.running_since_s is not None for p in pools) and time.monotonic() < deadline_s:
            threading.Event().wait(0.01)
        quiet = all(pool.running_since_s is None for pool in pools) and self._side_thread_is_idle(deadline_s)
        for queue in pools:
            queue.close(wait=quiet)
        self._side_thread.shutdown(wait=quiet)
        if not quiet:
            log.error("disk tier: %s hangs; its files stay open", self.directory)
            return
        self.files.close()
        self._opener.close()

    def _side_thread_is_idle(self, deadline_s: float) -> bool:
        if self._opener.runs:
            return False
        with contextlib.suppress(RuntimeError):  # closed before
            last = self._side_thread.submit(int)
            return not wait((last,), timeout=max(0.0, deadline_s - time.monotonic())).not_done
        return True

    def _write_failed(self, slab: int, error: Exception) -> None:
        # A segment without a published block was just being created, and has no room; any other one is kept.
        full = isinstance(error, OSError) and error.errno in _FULL and not self.table.slabs[slab].published
        if full:
            if self.table.may_grow:
                log.warning("disk tier: no room for another segment in %s", self.directory)
            self.table.may_grow = False
            asyncio.get_running_loop().call_later(FULL_RETRY_S, self._try_growing)
        elif not isinstance(error, Unavailable):
            self.watch.record_error("write", error)
        if (full or isinstance(error, SyncFailed)) and slab not in self._retired:
            self._retired.add(slab)
            if lost := self.table.retire(slab):
                for listener in self.listeners:
                    listener.blocks_lost(lost)

    def _try_growing(self) -> None:
        self.table.may_grow = True

    def _reclaimable_segments(self) -> list[int]:
        return [slab for slab in self._retired if not self.table.slabs[slab].taken]

    def cancel_waiting(self) -> None:
        """Cancel queued calls because the disk is unavailable."""
        gone = Unavailable(f"{self.directory} is unavailable")
        self._reads.cancel_waiting(gone)
        self._writes.cancel_waiting(gone)

    def state_changed(self) -> None:
        """Notify the listeners of another state of health."""
        for listener in self.listeners:
            listener.disk_changed()

    async def probe(self) -> None:
        """Probe the disk, after opening it if needed, and remove retired segments. Raises OSError."""
        loop = asyncio.get_running_loop()
        if not self._opener.opened:
            await self._open_in_thread()
        await loop.run_in_executor(self._side_thread, self.files.probe)
        for slab in self._reclaimable_segments():
            await loop.run_in_executor(self._side_thread, self.files.remove, slab)
            self.table.revive(slab)
            self._retired.remove(slab)

    async def _open_in_thread(self) -> None:
        """Open the disk while the node runs. Raises OSError, FailedPrecondition."""
        found = await self._opener.load_in_thread(self._apply_opened)
        found.on_change, self.table = self.table.on_change, found
        await publish_all(found)

    def _apply_opened(self, found: OpenedDisk) -> None:
        self._generation = found.generation
        if found.write_error is not None:
            log.warning("disk tier: %s takes no blocks for now: %s", self.directory, found.write_error)
            self.health.record_write_failure(now_s=self._clock_s())

    def _new_table(self) -> DiskTable:
        return DiskTable(
            n_slabs=self._n_segments, slab_bytes=self._segment_bytes, tenant_share=self._tenant_share
        )
