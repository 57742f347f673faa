"""The index of a disk from the headers of its segments, at start. Blocking."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from services.kvstore.disk_files import SegmentFiles
from services.kvstore.disk_format import FoundHeaders, Superblock
from services.kvstore.disk_table import DiskTable

Restored = tuple[Superblock, FoundHeaders] | None
Map = Callable[[Callable[[Path], Restored], list[Path]], Iterable[Restored]]


def rebuild(
    table: DiskTable,
    files: SegmentFiles,
    *,
    map_: Map = map,
    progress: Callable[[int, int], None] = lambda n_done, n_segments: None,
) -> int:
    """Fill an empty table with the blocks that are found, of two with one key the newer; returns the
    highest generation. `map_` reads segments, in threads for speed. Raises OSError when the directory
    cannot be read.
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
