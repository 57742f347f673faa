"""Which bytes of a shard are read from the page cache, and which stay out of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from libs.engine.model.checkpoint import Checkpoint, weights_digest
from libs.engine.model.shard_file import ALIGNED, ShardFile
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


def mapped_bytes(path: Path) -> list[int]:
    """The bytes in memory of each mapping of a file by this process."""
    mapping = rf" {re.escape(str(path))}\n(?:.+\n)*?Rss: +(\d+) kB"
    return [int(kb) << 10 for kb in re.findall(mapping, Path("/proc/self/smaps").read_text())]


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
        for offset in (0, 20_000_001):  # the kernel reads ahead of reads at the begin of a file
            assert reader.copy("a", offset, 500) == content[offset : offset + 500]
    finally:
        reader.close()
    assert cached_bytes(shard) <= 2 * mmap.PAGESIZE


def test_rows_of_which_others_take_columns_stay_in_the_page_cache(tmp_path: Path) -> None:
    wide = TINY_CONFIG | {"vocab_size": 65_536}
    write_random_checkpoint(tmp_path, RandomCheckpoint(config=wide, n_shards=1))
    (path,) = tmp_path.glob("*.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        name, shape = "model.embed_tokens.weight", (65_536, wide["hidden_size"])
        rows = checkpoint.rows(name, shape)
        wanted, n_bytes = checkpoint.tensor(name), checkpoint.header(name).stored_bytes
        evict(path)
        assert rows.read().equal(wanted)
        assert cached_bytes(path) < n_bytes / 2
        assert rows.cut(None, slice(1, 9)).read().equal(wanted[:, 1:9])
        assert cached_bytes(path) >= n_bytes


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
    os.pread(file.buffered, 1, 4097)  # one page is cached
    assert file.map_cached(4097, 1_000_000) is None
    assert file.map_cached(4097, 1) is not None
    file.close()


def test_a_load_maps_a_piece_at_a_time_and_leaves_nothing_open(shard: Path) -> None:
    reader = ShardReader(shard.parent)
    for offset in range(0, _FILE_BYTES, 1 << 20):
        assert reader.map_cached("a", offset, 1 << 20) is not None
    (held_bytes,) = mapped_bytes(shard)
    assert 0 < held_bytes <= 2 << 20
    reader.close()
    assert not mapped_bytes(shard)
    descriptors = Path("/proc/self/fd").iterdir()
    assert shard not in [entry.readlink() for entry in descriptors if entry.is_symlink()]


def test_a_file_system_without_direct_io_is_read_through_the_page_cache(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_any = os.open

    def refuse_direct(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_any(path, flags)

    content = shard.read_bytes()
    evict(shard)
    monkeypatch.setattr(os, "open", refuse_direct)
    reader = ShardReader(shard.parent)
    try:
        assert reader.read("a", 4097, 300_000).tobytes() == content[4097:304_097]
    finally:
        reader.close()


def test_a_process_without_descriptors_reads_past_the_page_cache_or_not_at_all(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_any, opened = os.open, list[int]()

    def refuse_direct(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.append(open_any(path, flags))
        return opened[-1]

    monkeypatch.setattr(os, "open", refuse_direct)
    with pytest.raises(OSError, match="Too many open files"):
        ShardFile(shard)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


@pytest.mark.parametrize("others_read", [False, True])
def test_a_read_may_give_less_than_was_asked_for(
    shard: Path, others_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, read_any = shard.read_bytes(), os.preadv
    most_bytes = 1000 if others_read else ALIGNED + 512
    monkeypatch.setattr(os, "preadv", lambda *call: min(read_any(*call), most_bytes))
    reader = ShardReader(shard.parent)
    try:
        found = reader.read("a", 4097, 30_000, others_read=others_read)
        assert found.tobytes() == content[4097:34_097]
        with pytest.raises(OSError, match="ends too early"):
            reader.read("a", _FILE_BYTES - 10, 20, others_read=others_read)
    finally:
        reader.close()


def test_the_digest_reads_no_more_than_a_header_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.engine.model.checkpoint.MAX_HEADER_BYTES", 4096)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + bytes(_FILE_BYTES))
    evict(path)
    weights_digest(tmp_path)
    assert cached_bytes(path) < 1 << 20


def test_bytes_that_a_file_gets_after_it_was_mapped_are_not_in_the_mapping(shard: Path) -> None:
    content = shard.read_bytes()
    reader = ShardReader(shard.parent)
    try:
        os.truncate(shard, 10_000)
        mapped = reader.map_cached("a", 0, 5_000)
        assert mapped is not None and mapped.tobytes() == content[:5_000]
        shard.write_bytes(content)  # in the page cache
        assert reader.map_cached("a", 8_000, 200_000) is None
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
