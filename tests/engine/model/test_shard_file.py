"""Which bytes of a shard are read from the page cache, and which stay out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from libs.engine.model.checkpoint import Checkpoint, weights_digest
from libs.engine.model.shard_file import ShardFile
from libs.engine.model.shard_reader import ShardReader
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

_FILE_BYTES = 24 << 20


def cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache. This process must own the file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        pages = ctypes.create_string_buffer(-(-len(memory) // mmap.PAGESIZE))
        address = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(memory)), pages) == 0
        return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip("the file system keeps files in memory")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A file that is in the page cache."""
    path = tmp_path / "a"
    path.write_bytes(np.random.default_rng(5).integers(0, 256, _FILE_BYTES, np.uint8).tobytes())
    return path


def test_reads_leave_no_other_bytes_in_the_page_cache(shard: Path) -> None:
    content = shard.read_bytes()
    evict(shard)
    reader = ShardReader(shard.parent)
    try:
        for offset in (0, 1_000_000, 9_000_001):
            assert reader.read("a", offset, 300_000).tobytes() == content[offset : offset + 300_000]
        assert reader.copy("a", 20_000_001, 500) == content[20_000_001:20_000_501]
    finally:
        reader.close()
    assert cached_bytes(shard) <= 2 * mmap.PAGESIZE


def test_the_headers_and_the_digest_leave_the_values_out_of_the_page_cache(tmp_path: Path) -> None:
    wide = TINY_CONFIG | {"vocab_size": 65_536}
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=wide, n_shards=1))
    (path,) = tmp_path.glob("*.safetensors")
    assert path.stat().st_size > 16 << 20
    evict(path)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.tensor("model.norm.weight")
    assert cached_bytes(path) < 1 << 20
    weights_digest(tmp_path)
    assert cached_bytes(path) < 4 << 20  # two pages for each of 256 samples


def test_cached_bytes_are_mapped_until_the_thread_reads_again(shard: Path) -> None:
    content = shard.read_bytes()
    file = ShardFile(shard)
    found = file.map_cached(4097, 1_000_000)
    assert found is not None and found.tobytes() == content[4097:1_004_097]
    file.unmap(4097, 1_000_000)
    assert file.map_cached(_FILE_BYTES - 1, 2) is None  # behind the end
    evict(shard)
    assert file.map_cached(4097, 1_000_000) is None
    file.close()


def test_bytes_that_a_file_gets_after_it_was_mapped_are_not_in_the_mapping(shard: Path) -> None:
    content = shard.read_bytes()
    reader = ShardReader(shard.parent)
    try:
        os.truncate(shard, 10_000)
        assert reader.read("a", 0, 5_000).tobytes() == content[:5_000]
        shard.write_bytes(content)  # in the page cache
        assert reader.read("a", 8_000, 200_000).tobytes() == content[8_000:208_000]
    finally:
        reader.close()


def test_files_whose_cached_pages_the_kernel_hides_are_not_mapped(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: shard.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    file = ShardFile(shard)
    assert file.map_cached(0, 4096) is None
    file.close()
