"""Files that another process put in place of packed weights: no load waits for them, and none is believed."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from libs.engine.packed import packed_file
from libs.engine.packed.packed_file import PackedFileUnusable, PackedIndex
from libs.engine.packed.packed_key import packed_key
from libs.engine.packed.shared_weights import PackedSource, open_shared_weights
from libs.engine.packed.weight_store import MappedWeights, NewPackedFile, PrivateWeights, WeightStore
from libs.engine.step.load_progress import LoadProgress

WAIT_S = 100.0
VALUES = torch.arange(1000, dtype=torch.float32)


@pytest.fixture
def source(tmp_path: Path) -> PackedSource:
    (tmp_path / "packed").mkdir()
    return PackedSource(tmp_path / "packed" / "m.packed", lambda: "key", 4096, lambda memory: Any)  # type: ignore[arg-type,return-value]


def _load(source: PackedSource) -> WeightStore:
    """Load in a thread, so that a load that waits for ever fails."""
    stores: list[WeightStore] = []

    def run() -> None:
        with open_shared_weights(source, LoadProgress()) as store:
            assert torch.equal(store.tensor("w", lambda: VALUES), VALUES)
        stores.append(store)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    (store,) = stores
    return store


@pytest.mark.parametrize(
    ("suffix", "expected"), [("", NewPackedFile), (".lock", NewPackedFile), (".part", NewPackedFile)]
)
def test_no_load_waits_for_a_named_pipe(source: PackedSource, suffix: str, expected: type) -> None:
    os.mkfifo(source.path.with_name(f"{source.path.name}{suffix}"))
    assert isinstance(_load(source), expected)
    assert isinstance(_load(source), MappedWeights)


@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_no_link_is_followed(source: PackedSource, suffix: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    if not suffix:
        _load(source)
        source.path.rename(elsewhere)
    source.path.with_name(f"{source.path.name}{suffix}").unlink(missing_ok=True)
    source.path.with_name(f"{source.path.name}{suffix}").symlink_to(elsewhere)
    assert isinstance(_load(source), PrivateWeights)
    assert bool(suffix) != elsewhere.exists()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_packed_again(source: PackedSource, mode: int) -> None:
    _load(source)
    source.path.chmod(mode)
    assert isinstance(_load(source), NewPackedFile)
    assert source.path.stat().st_mode & 0o777 == 0o600


def test_only_the_owner_can_hold_the_lock(source: PackedSource) -> None:
    _load(source)
    assert source.path.with_name("m.packed.lock").stat().st_mode & 0o777 == 0o600


def _write(path: Path, body: bytes, *, before: int = 4096, length: int | None = None) -> None:
    """A file whose trailer fits its index: checksums are no secret."""
    trailer = struct.pack(
        "<8sQ16s", b"SLIPPACK", len(body) if length is None else length, packed_file._CHECKSUM.of(body)
    )
    with path.open("wb") as file:
        file.truncate(before)
        file.seek(before)
        file.write(body + trailer)


def _with_tensor(**change: object) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"]["w"].update(change)


def _with_matrix(**change: object) -> Callable[[dict[str, Any]], None]:
    def edit(index: dict[str, Any]) -> None:
        matrix = {"rows": 1, "cols": 1, "data": index["tensors"]["w"] | change}
        index["matrices"]["m"] = matrix

    return edit


CHANGES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "offset beyond the file": _with_tensor(offset=1 << 40),
    "offset at the end": _with_tensor(offset=4096),
    "negative offset": _with_tensor(offset=-64),
    "offset within a value": _with_tensor(offset=1),
    "huge shape": _with_tensor(shape=[1 << 62, 4]),
    "negative shape": _with_tensor(shape=[-1]),
    "two negatives": _with_tensor(shape=[-10, -10]),
    "unknown type": _with_tensor(dtype="complex64"),
    "matrix": _with_matrix(offset=1 << 40),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_index_with_a_tensor_outside_of_the_file_is_refused(
    source: PackedSource, change: Callable[[dict[str, Any]], None]
) -> None:
    _load(source)
    descriptor = os.open(source.path, os.O_RDONLY)
    good = packed_file._read_index(descriptor)
    os.close(descriptor)
    index: dict[str, Any] = msgspec.to_builtins(good)
    _replace_index(source.path, good, index)
    assert isinstance(_load(source), MappedWeights)  # the premise: what is written so is believed
    change(index)
    _replace_index(source.path, good, index)
    assert isinstance(_load(source), NewPackedFile)
    assert isinstance(_load(source), MappedWeights)


def _replace_index(path: Path, good: PackedIndex, index: dict[str, Any]) -> None:
    with path.open("r+b") as file:
        file.truncate(good.n_bytes)
        body = msgspec.json.encode(index)
        file.seek(good.n_bytes)
        file.write(body + struct.pack("<8sQ16s", b"SLIPPACK", len(body), packed_file._CHECKSUM.of(body)))


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b'{"key": NaN}', b"null"])
def test_an_index_that_is_none_is_refused(source: PackedSource, body: bytes) -> None:
    _write(source.path, body)
    assert isinstance(_load(source), NewPackedFile)


def test_a_damaged_length_takes_no_memory(source: PackedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(source.path, b"{}", before=1 << 40, length=1 << 39)  # a sparse file
    reads: list[int] = []
    pread = os.pread

    def read(file: int, n_bytes: int, at: int) -> bytes:
        reads.append(n_bytes)
        return pread(file, min(n_bytes, 1 << 20), at)

    monkeypatch.setattr(os, "pread", read)
    with pytest.raises(PackedFileUnusable, match="index"):
        packed_file.open_packed_file(source.path, source.key, lambda n_bytes: None)
    assert max(reads) < 1 << 20


def test_a_shard_with_the_size_and_time_of_another_has_another_key(tmp_path: Path) -> None:
    """The digest has samples of the shards only."""
    shard, library = tmp_path / "a.safetensors", tmp_path / "kernels.so"
    library.write_bytes(b"kernels")
    shard.write_bytes(b"one")
    found = shard.stat()
    key = packed_key(tmp_path, [shard.name], library, "auto", "digest")
    assert packed_key(tmp_path, [shard.name], library, "auto", "digest") == key
    deadline_s = time.monotonic() + WAIT_S
    while shard.stat().st_ctime_ns == found.st_ctime_ns:  # the clock of files is coarse
        assert time.monotonic() < deadline_s
        shard.write_bytes(b"two")
        os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert packed_key(tmp_path, [shard.name], library, "auto", "digest") != key
