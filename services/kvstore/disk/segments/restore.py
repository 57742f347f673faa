"""Recovery of a disk's index from the headers of its segments, at start. Blocking."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.kvstore.disk.segment_format import FoundHeaders, Superblock
from services.kvstore.disk.segments.files import SegmentFiles
from services.kvstore.disk.table.table import DiskTable

log = logging.getLogger(__name__)

SCAN_THREADS = 8
PROGRESS_S = 1.0

Restored = tuple[Superblock, FoundHeaders] | None
Map = Callable[[Callable[[Path], Restored], list[Path]], Iterable[Restored]]


def rebuild(
    table: DiskTable,
    files: SegmentFiles,
    *,
    map_: Map = map,
    progress: Callable[[int, int], None] = lambda n_done, n_segments: None,
) -> int:
    """Fill an empty table with the blocks on the disk, newest per key; returns the highest generation.

    `map_` reads the segments, in threads for speed. Raises OSError when the directory cannot be read.
    """
    paths = files.io.segments(files.directory)
    restored = map_(functools.partial(files.restore, n_segments=table.n_slabs), paths)
    cut = 0
    for n_done, found in enumerate(restored, start=1):
        if found is not None:
            superblock, headers = found
            table.restore(superblock.number, superblock.slot_bytes, superblock.cut_generation, headers)
            cut = max(cut, superblock.cut_generation)
        progress(n_done, len(paths))
    return max(table.index_restored(), cut)


@dataclass(frozen=True, slots=True)
class OpenedDisk:
    """A locked directory: its highest generation, and the error that keeps it read-only, if any."""

    generation: int
    lock_fd: int
    write_error: OSError | None


def open_disk(
    table: DiskTable,
    files: SegmentFiles,
    *,
    clock_s: Callable[[], float],
    on_step: Callable[[], None] = lambda: None,
) -> OpenedDisk:
    """Lock the directory of `files` and fill the empty table. `on_step` is called after every step.

    Raises OSError when the disk cannot be read, FailedPrecondition when the directory cannot be used or
    another process has locked it; closes everything then.
    """
    begun_s = said_s = clock_s()
    lock_fd = files.io.lock_directory(files.directory)
    on_step()

    def progress(n_done: int, n_segments: int) -> None:
        nonlocal said_s
        on_step()
        if clock_s() - said_s >= PROGRESS_S:
            said_s = clock_s()
            log.info("disk tier: %d of %d segments of %s read", n_done, n_segments, files.directory)

    write_error: OSError | None = None
    try:
        try:
            files.probe()
        except OSError as error:
            write_error = error
        on_step()
        with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="kv-scan") as threads:
            generation = rebuild(table, files, map_=threads.map, progress=progress)
    except BaseException:
        files.close()
        files.io.close(lock_fd)
        raise
    log.info(
        "disk tier: %d blocks in %d segments of %s found in %.2f s (%s)",
        table.n_blocks,
        files.n_open,
        files.directory,
        clock_s() - begun_s,
        "direct I/O" if files.io.direct else "buffered",
    )
    if not files.io.direct:
        log.warning("disk tier: the filesystem of %s refuses direct I/O: files are buffered", files.directory)
    return OpenedDisk(generation, lock_fd, write_error)
