"""The tier of one disk: blocks in preallocated segment files, verified on every read.

Nothing here fails a request. A block that cannot be read or does not verify is dropped and is a miss. A
disk that fails writes takes no more blocks, one that hangs or fails reads is away, until a probe finds it
well again (`disk_health.py`). A full disk stays at the segments it has. A segment whose sync failed is
never trusted again: all its blocks are dropped, and the file is removed. The index is rebuilt from the
headers at start, and a payload is only believed when its checksum is right, whatever a crash left there.

The table is used from the event loop only; files are read and written in small thread pools.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from libs.common.errors import DataCorrupt, NotFound, SlipstreamError, Unavailable
from libs.common.registered_memory import PAGE_BYTES
from services.kvstore.disk_block import DiskBlock
from services.kvstore.disk_files import BlockRead, BlockWrite, SegmentFiles, follows
from services.kvstore.disk_format import HEADER_BYTES, BlockHeader
from services.kvstore.disk_health import READ_HANGS_AFTER_S, DiskHealth, DiskState
from services.kvstore.disk_io import DiskIo, SystemDiskIo
from services.kvstore.disk_queue import DiskQueue
from services.kvstore.disk_restore import rebuild
from services.kvstore.disk_table import DiskTable
from services.kvstore.segment_file import SyncFailed

log = logging.getLogger(__name__)

MAX_SEGMENT_FILE_BYTES = 64 << 20
READ_THREADS = 8  # half of them wait for the interpreter or verify while the others keep the disk busy
WRITE_THREADS = 4
GROUPS_AT_ONCE = 2
MAX_GROUP_BYTES = 16 << 20
MAX_GROUP_BLOCKS = 32  # half of what a disk is given at once: one group syncs while another writes
TICK_S = 0.1
FULL_RETRY_S = 5.0
CLOSE_WAIT_S = 10.0
PROGRESS_S = 1.0
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
        io: DiskIo | None = None,
        health: DiskHealth | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        segment_bytes = segment_bytes_for(disk_bytes)
        n_segments = disk_bytes // (segment_bytes + HEADER_BYTES) if segment_bytes else 0
        self.directory = directory
        self.table = DiskTable(n_slabs=n_segments, slab_bytes=segment_bytes)
        self.files = SegmentFiles(directory, segment_bytes=segment_bytes, io=io or SystemDiskIo())
        self.health = health or DiskHealth()
        self._clock_s = clock_s
        self._reads: DiskQueue[BlockRead] = DiskQueue(
            "kv-read",
            n_threads=READ_THREADS,
            take=_take_run,
            work=self.files.load,
            order=lambda read: (read.slot.slab, read.slot.index),
            clock_s=clock_s,
        )
        self._payload_threads = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="kv-payload")
        self._writes: DiskQueue[BlockWrite] = DiskQueue(
            "kv-write",
            n_threads=GROUPS_AT_ONCE,
            take=_take_group,
            work=self._write_group,
            order=None,
            clock_s=clock_s,
        )
        self._side_thread = ThreadPoolExecutor(1, thread_name_prefix="kv-side")  # probes and scrubs
        self._generation = 0
        self._writing: set[bytes] = set()
        self._retired: set[int] = set()
        self._ticking: asyncio.TimerHandle | None = None
        self._tick_due_s = 0.0
        self._probing: asyncio.Task[None] | None = None
        self._lock_fd = -1
        self._closed = False
        self.on_lost: Callable[[Sequence[bytes]], None] = lambda keys: None
        self.on_away: Callable[[], None] = lambda: None
        self.on_state: Callable[[], None] = lambda: None  # the state is another one
        self.corrupt_blocks = 0
        self.io_errors = 0
        self.scrubbed_blocks = 0

    @property
    def read_only(self) -> bool:
        """Whether it takes no blocks now."""
        return self.health.state != DiskState.OK

    @property
    def away(self) -> bool:
        """Whether its blocks are misses now."""
        return self.health.state == DiskState.AWAY

    @property
    def n_writing(self) -> int:
        """Blocks on their way to the disk."""
        return len(self._writing)

    def open(self) -> None:
        """Take the directory and rebuild the index from what is there. Blocking; before any use.

        Raises FailedPrecondition when the directory cannot be used or another process has it.
        """
        self._lock_fd = self.files.io.take(self.directory)
        try:
            self.files.probe()
        except OSError as error:
            log.warning("disk tier: %s takes no blocks for now: %s", self.directory, error)
            self.health.write_failed(now_s=self._clock_s())
        begun_s = said_s = self._clock_s()

        def progress(n_done: int, n_segments: int) -> None:
            nonlocal said_s
            if self._clock_s() - said_s >= PROGRESS_S:
                said_s = self._clock_s()
                log.info("disk tier: %d of %d segments of %s read", n_done, n_segments, self.directory)

        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="kv-scan") as threads:
            self._generation = rebuild(self.table, self.files, map_=threads.map, progress=progress)
        log.info(
            "disk tier: %d blocks in %d segments of %s found in %.2f s (%s)",
            self.table.n_blocks,
            self.files.n_open,
            self.directory,
            self._clock_s() - begun_s,
            "direct I/O" if self.files.io.direct else "buffered: the filesystem refuses direct I/O",
        )

    def start(self) -> None:
        """Look after a disk that was not well when it was opened; needs a running loop."""
        self._keep_ticking()

    def contains(self, key: bytes) -> bool:
        """Whether a block is indexed. It may still turn out not to verify."""
        return not self.away and self.table.contains(key)

    async def read(self, key: bytes, address: int) -> tuple[int, bytes]:
        """Read one block, as `read_many`; returns its length and payload checksum. Raises NotFound,
        DataCorrupt, Unavailable."""
        (found,) = await self.read_many([(key, address)])
        if isinstance(found, SlipstreamError):
            raise found
        return found

    async def read_many(
        self, wanted: Sequence[tuple[bytes, int]]
    ) -> list[tuple[int, bytes] | SlipstreamError]:
        """Read blocks into memory at their addresses, which have room for their page-rounded lengths.

        Gives each one's length and payload checksum, verified, or why it cannot be had: NotFound,
        DataCorrupt, Unavailable. Must not be cancelled: the memory is written to until this returns.
        """
        blocks = [None] * len(wanted) if self.away else self.table.get_many([key for key, _ in wanted])
        reads = [
            BlockRead(block, address)
            for block, (_, address) in zip(blocks, wanted, strict=True)
            if block is not None
        ]
        for read in reads:
            self.table.hold(read.block)
        try:
            self._keep_ticking()
            ended = iter(await self._reads.add(reads))
        finally:
            for read in reads:
                self.table.unhold(read.block)
        return [
            NotFound("no such block") if block is None else self._read(block, next(ended)) for block in blocks
        ]

    def _read(self, block: DiskBlock, error: Exception | None) -> tuple[int, bytes] | SlipstreamError:
        """How a read ended; a block that cannot be had is dropped."""
        if error is None:
            self.health.read_ended(failed=False, now_s=0.0)
            return block.n_bytes, block.checksum
        if isinstance(error, DataCorrupt):
            self.corrupt_blocks += self.table.drop(block)
            return error
        if isinstance(error, Unavailable):
            return error
        self.table.drop(block)
        self._failed("read", error)
        return Unavailable(f"the disk failed a read: {error}")

    async def write(self, key: bytes, address: int, n_bytes: int, checksum: bytes) -> bool:
        """Write the block at `address` and publish it once synced; False when the tier did not take it.

        After True the block is durable: a crash does not take it. The memory up to the page-rounded
        length must stay as it is until this returns, so this must not be cancelled either.
        """
        if self.read_only or key in self._writing or self.table.contains(key):
            return False
        slot = self.table.allocate(n_bytes, generation=self._generation)
        if slot is None:
            return False
        self._generation += 1
        header = BlockHeader(key, n_bytes, self._generation, checksum)
        cut_generation = self.table.slabs[slot.slab].cut_generation
        self._writing.add(key)
        self._keep_ticking()
        published = False
        try:
            error = await self._writes.do(BlockWrite(header, slot, cut_generation, address))
            if error is None and not self.table.slabs[slot.slab].retired:
                self.table.publish(key, slot, n_bytes, header.generation, checksum)
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
            self._failed("read", error)
            raise Unavailable(f"the disk failed a read: {error}") from error
        finally:
            self.table.unhold(block)
        self.scrubbed_blocks += 1
        if not whole and self.table.drop(block):
            self.corrupt_blocks += 1
        return whole

    async def forget(self, block: DiskBlock) -> bool:
        """Drop a block and erase its header, so that no start finds it; False when it was gone."""
        self.table.hold(block)
        try:
            dropped = self.table.drop(block)
            if dropped:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._side_thread, self.files.erase, block)
        finally:
            self.table.unhold(block)
        return dropped

    def close(self) -> None:
        """Close the files, after what runs has ended. Blocking. Idempotent.

        When a call hangs beyond CLOSE_WAIT_S the files stay open: it may still use them.
        """
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        give_up_at = time.monotonic() + CLOSE_WAIT_S
        pools = (self._reads, self._writes)
        while any(p.running_since_s is not None for p in pools) and time.monotonic() < give_up_at:
            threading.Event().wait(0.01)
        quiet = all(pool.running_since_s is None for pool in pools)
        for queue in pools:
            queue.close(wait=quiet)
        self._payload_threads.shutdown(wait=quiet)
        self._side_thread.shutdown(wait=quiet)
        if not quiet:
            log.error("disk tier: %s hangs; its files stay open", self.directory)
            return
        self.files.close()
        if self._lock_fd >= 0:
            self.files.io.close(self._lock_fd)
            self._lock_fd = -1

    def _write_group(self, group: Sequence[BlockWrite]) -> list[Exception | None]:
        return self.files.write_group(group, self._payload_threads)

    def _write_failed(self, slab: int, error: Exception) -> None:
        # Without a published block the segment was to be made, or never got room; else it is kept.
        full = isinstance(error, OSError) and error.errno in _FULL and not self.table.slabs[slab].published
        if full:
            if self.table.may_grow:
                log.warning("disk tier: no room for another segment in %s", self.directory)
            self.table.may_grow = False
            asyncio.get_running_loop().call_later(FULL_RETRY_S, self._try_growing)
        elif not isinstance(error, Unavailable):
            self._failed("write", error)
        if (full or isinstance(error, SyncFailed)) and slab not in self._retired:
            self._retired.add(slab)
            if lost := self.table.retire(slab):
                self.on_lost(lost)

    def _failed(self, what: str, error: BaseException) -> None:
        self.io_errors += 1
        before = self.health.state
        if what == "read":
            self.health.read_ended(failed=True, now_s=self._clock_s())
        else:
            self.health.write_failed(now_s=self._clock_s())
        self._state_may_have_changed(before, f"a {what} failed: {error}")
        self._keep_ticking()

    def _state_may_have_changed(self, before: DiskState, why: str) -> None:
        if self.health.state == before:
            return
        log.error("disk tier: %s is %s: %s", self.directory, self.health.state.name, why)
        self.on_state()
        if self.away:
            gone = Unavailable(f"{self.directory} is away")
            self._reads.give_up_waiting(gone)
            self._writes.give_up_waiting(gone)
            self.on_away()

    def _try_growing(self) -> None:
        self.table.may_grow = True

    def _keep_ticking(self) -> None:
        if self._ticking is None and not self._closed:
            self._tick_due_s = self._clock_s() + TICK_S
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Look for calls that hang, and probe a disk that is not well."""
        self._ticking = None
        before, now_s = self.health.state, self._clock_s()
        if now_s < self._tick_due_s + TICK_S:  # else this process gets no time, and the disk may be well
            self.health.calls_run_since(
                read_s=self._reads.running_since_s, write_s=self._writes.running_since_s, now_s=now_s
            )
            self._state_may_have_changed(before, "a call does not return")
        full = self.health.state == DiskState.OK and self._quiet_retired()
        if (full or self.health.probe_is_due(now_s=now_s)) and self._probing is None:
            self._probing = asyncio.create_task(self._probe())
        if self.read_only or self._retired or len(self._reads) or len(self._writes):
            self._keep_ticking()

    def _quiet_retired(self) -> list[int]:
        return [slab for slab in self._retired if not self.table.slabs[slab].taken]

    async def _probe(self) -> None:
        """See whether the disk does what it should, then reclaim the segments that were given up."""
        before, succeeded = self.health.state, True
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._side_thread, self.files.probe)
            for slab in self._quiet_retired():
                await loop.run_in_executor(self._side_thread, self.files.remove, slab)
                self.table.revive(slab)
                self._retired.remove(slab)
        except OSError as error:
            succeeded = False
            log.info("disk tier: %s is still %s: %s", self.directory, before.name, error)
        finally:
            self._probing = None
        now_s = self._clock_s()
        hanging = any(
            since is not None and now_s - since > READ_HANGS_AFTER_S
            for since in (self._reads.running_since_s, self._writes.running_since_s)
        )
        self.health.probed(succeeded=succeeded, hanging=hanging, now_s=now_s)
        if self.health.state == DiskState.OK and before != DiskState.OK:
            log.warning("disk tier: %s is back", self.directory)
            self.on_state()


def _take_run(waiting: deque[BlockRead]) -> list[BlockRead]:
    run = [waiting.popleft()]
    while waiting and follows(run[-1].slot, waiting[0].slot, len(run)):
        run.append(waiting.popleft())
    return run


def _take_group(waiting: deque[BlockWrite]) -> list[BlockWrite]:
    group: list[BlockWrite] = []
    n_bytes = 0
    while waiting and len(group) < MAX_GROUP_BLOCKS:
        if group and n_bytes + waiting[0].slot.slot_bytes > MAX_GROUP_BYTES:
            break
        group.append(waiting.popleft())
        n_bytes += group[-1].slot.slot_bytes
    return group
