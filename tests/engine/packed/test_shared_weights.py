"""Packed weights in a file: what is mapped equals what is packed, and no other weights are ever mapped."""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.shards import CheckpointError
from libs.engine.packed import packed_file, packed_key, shared_weights, weight_store
from libs.engine.packed.file_memory import FileMemory
from libs.engine.packed.shared_weights import PackedSource, open_shared_weights
from libs.engine.packed.weight_store import PrivateWeights
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.load_progress import LoadProgress
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

SPECS = {
    "int4": RandomCheckpoint(config=TINY_CONFIG),
    "fp8": RandomCheckpoint(config=TINY_CONFIG, quantization="fp8", fp8_block=(16, 16)),
    "tied fp32": RandomCheckpoint(
        config=TINY_CONFIG | {"tie_word_embeddings": True, "q_lora_rank": None},
        quantization="none",
        dtype="float32",
    ),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "model", SPECS["int4"])
    return tmp_path / "model"


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were packed and named."""
    found: list[Path] = []
    finish = weight_store.NewPackedFile.finish

    def note(self: weight_store.NewPackedFile) -> None:
        finish(self)
        found.append(self._path)

    monkeypatch.setattr(weight_store.NewPackedFile, "finish", note)
    return found


def load(model: Path, folder: Path | None, **options: object) -> ModelRunner:
    return ModelRunner.load(model, RunnerOptions(n_pages=2, packed_dir=folder, threads=1, **options))  # type: ignore[arg-type]


def logits(runner: ModelRunner) -> torch.Tensor:
    n = 11
    return runner.forward(
        ForwardBatch(
            token_ids=np.arange(n, dtype=np.int32) * 7 + 3,
            positions=np.arange(n, dtype=np.int32),
            query_start=np.array([0, n], np.int32),
            context_len=np.array([n], np.int32),
            page_table=np.zeros((1, 1), np.int32),
            logit_rows=np.arange(n, dtype=np.int32),
        )
    ).logits


def only_file(folder: Path) -> Path:
    (found,) = folder.glob("*.packed")
    return found


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_mapped_weights_give_the_same_bits_and_no_value_of_the_checkpoint_is_read(
    tmp_path: Path, spec: RandomCheckpoint, packings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = tmp_path / "model", tmp_path / "packed"
    write_random_checkpoint(model, spec)
    alone = logits(load(model, None))
    assert torch.equal(logits(load(model, folder)), alone)
    assert packings == [only_file(folder)]
    assert not list(folder.glob("*.part"))

    def refuse(*_: object) -> None:
        raise AssertionError("a value of the checkpoint is read")

    monkeypatch.setattr(Checkpoint, "_count", refuse)
    progress = LoadProgress()
    assert torch.equal(logits(load(model, folder, progress=progress)), alone)
    assert len(packings) == 1
    assert 0 < progress.done_bytes == progress.total_bytes


def _other_values(model: Path) -> None:
    write_random_checkpoint(model, RandomCheckpoint(config=TINY_CONFIG, seed=9))


def _touched(model: Path) -> None:
    shard = next(model.glob("*.safetensors"))
    found = shard.stat()
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [_other_values, _touched])
def test_another_checkpoint_of_the_same_names_is_packed_again(
    model: Path, tmp_path: Path, packings: list[Path], change: Callable[[Path], None]
) -> None:
    folder = tmp_path / "packed"
    load(model, folder)
    change(model)
    assert torch.equal(logits(load(model, folder)), logits(load(model, None)))
    assert len(packings) == 2 and only_file(folder)


def test_other_kernels_versions_and_dtypes_do_not_take_the_file(
    model: Path, tmp_path: Path, packings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packed"
    load(model, folder)
    load(model, folder, compute_dtype="float32")
    n_kernels = len(packings)  # two where the processor has a unit for bf16
    load(model, folder, weight_dtype="float32")
    assert len(packings) == n_kernels + 1 == len(list(folder.glob("*.packed")))
    monkeypatch.setattr(packed_key, "PACKING_VERSION", packed_key.PACKING_VERSION + 1)
    load(model, folder)
    assert len(packings) == n_kernels + 2
    a, b = (tmp_path / name for name in ("a.so", "b.so"))
    a.write_bytes(b"1")
    b.write_bytes(b"2")
    keys = {packed_key.packed_key(model, [], library, "auto", "x") for library in (a, b)}
    assert len(keys) == 2


def _flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 16]))

    return damage


def _cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


DAMAGES = {
    "first byte": _flip(0),
    "middle": _flip(50_000),
    "index": _flip(-200),
    "trailer": _flip(-3),
    "half": _cut(0.5),
    "empty": _cut(0.0),
    "text": lambda path: path.write_text("no weights\n" * 99),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_never_used(
    model: Path,
    tmp_path: Path,
    packings: list[Path],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "packed"
    load(model, folder)
    damage(only_file(folder))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(model, folder)), logits(load(model, None)))
    assert len(packings) == 2 and "packed again" in caplog.text
    assert torch.equal(logits(load(model, folder)), logits(load(model, None)))
    assert len(packings) == 2


def test_a_file_of_another_user_is_never_used(
    model: Path, tmp_path: Path, packings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packed"
    load(model, folder)
    shutil.chown(only_file(folder), user=65534) if os.geteuid() == 0 else monkeypatch.setattr(
        os, "geteuid", lambda: 12345
    )
    load(model, folder)
    assert len(packings) == 2


def test_a_checkpoint_that_is_refused_leaves_no_file(model: Path, tmp_path: Path) -> None:
    with Checkpoint(model) as checkpoint:
        header = checkpoint.header("model.layers.0.self_attn.o_proj.weight")
    with (model / header.shard).open("r+b") as file:
        file.seek(header.offset)
        file.write(b"\xff" * 4)
    with pytest.raises(CheckpointError, match="o_proj"):
        load(model, tmp_path / "packed")
    assert [path.suffix for path in (tmp_path / "packed").iterdir()] == [".lock"]


@pytest.fixture(params=["no directory", "no room", "full", "full at the end", "no space to spare"])
def unusable_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which no file can be made, or in which it runs out of room."""
    folder, allocate = tmp_path / "packed", os.posix_fallocate

    def out_of_room(descriptor: int, offset: int, n_bytes: int) -> None:
        if offset or request.param == "no room":
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, n_bytes)

    if request.param == "no directory":
        folder.write_text("")
    elif request.param == "no space to spare":
        monkeypatch.setattr(shared_weights, "_FREE_SHARE", 0.0)
    elif request.param == "full at the end":
        monkeypatch.setattr(weight_store, "append_index", lambda *_: out_of_room(0, 1, 1))
    else:
        monkeypatch.setattr(os, "posix_fallocate", out_of_room)
    if request.param == "full":
        monkeypatch.setattr("libs.engine.packed.file_memory._LEAST_BYTES", 4096)
        real = FileMemory.__init__
        monkeypatch.setattr(FileMemory, "__init__", lambda self, file, _: real(self, file, 4096))
    return folder


def test_without_room_for_a_file_the_weights_are_private(
    model: Path, unusable_folder: Path, packings: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = load(model, unusable_folder)
    assert torch.equal(logits(runner), logits(load(model, None)))
    assert not packings and "not shared" in caplog.text
    if unusable_folder.is_dir():
        assert not [path for path in unusable_folder.iterdir() if path.suffix != ".lock"]


def test_the_room_that_a_small_file_lacks_is_logged_in_a_unit_that_shows_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_weights, "_FREE_SHARE", 0.0)
    with caplog.at_level(logging.WARNING):
        load(model, tmp_path)
    [needed] = re.findall(r"it needs ([\d.,]+) MB of [\d.,]+ MB free", caplog.text)
    assert float(needed) > 0


def test_a_process_waits_for_the_file_that_another_packs(
    model: Path, tmp_path: Path, packings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packed"
    load(model, folder)
    file = only_file(folder)
    hidden = file.rename(tmp_path / "hidden")
    polls: list[float] = []
    with file.with_name(f"{file.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish_elsewhere(pause_s: float) -> None:
            polls.append(pause_s)
            if len(polls) == 3:
                hidden.rename(file)

        monkeypatch.setattr("libs.engine.packed.shared_weights.time.sleep", finish_elsewhere)
        assert torch.equal(logits(load(model, folder)), logits(load(model, None)))
        assert len(polls) == 3 and len(packings) == 1
        file.unlink()
        clock = iter(range(0, 10**6, 10))
        monkeypatch.setattr("libs.engine.packed.shared_weights.time.monotonic", lambda: float(next(clock)))
        load(model, folder)  # the other one packs for ever
        assert len(packings) == 1 and not list(folder.glob("*.packed"))


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_process_waits_no_longer_for_a_packer_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_stopped: bool
) -> None:
    """One that packs touches the lock."""
    source, now_s = source_of(tmp_path / "x.packed"), 0.0
    lock_path = tmp_path / "x.packed.lock"

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += 1.0
        if not is_stopped:
            os.utime(lock_path, ns=(0, int(now_s)))

    monkeypatch.setattr("libs.engine.packed.shared_weights.time.sleep", sleep)
    monkeypatch.setattr("libs.engine.packed.shared_weights.time.monotonic", lambda: now_s)
    with lock_path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open_shared_weights(source, LoadProgress()) as store:
            assert isinstance(store, PrivateWeights)
    (line,) = caplog.messages
    assert ("shows no sign of life" if is_stopped else "for too long") in line
    assert now_s == 11 if is_stopped else now_s > 20


def test_a_lock_that_someone_deletes_is_no_packer_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_path, identity = tmp_path / "x.packed.lock", shared_weights._identity
    monkeypatch.setattr(
        shared_weights, "_identity", lambda path: (path != lock_path and identity(path)) or None
    )
    lock = lock_path.open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr("libs.engine.packed.shared_weights.time.sleep", lambda pause_s: lock.close())
    with open_shared_weights(source_of(tmp_path / "x.packed"), LoadProgress()) as store:
        assert not isinstance(store, PrivateWeights)
        store.tensor("weight", lambda: torch.zeros(4))


def test_a_process_that_packs_touches_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.engine.packed.shared_weights._HEARTBEAT_S", 0.01)
    with open_shared_weights(source_of(tmp_path / "x.packed"), LoadProgress()) as store:
        store.tensor("weight", lambda: torch.zeros(4))
        lock = tmp_path / "x.packed.lock"
        os.utime(lock, ns=(0, 0))
        deadline_s = time.monotonic() + 60
        while not lock.stat().st_mtime_ns:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def source_of(path: Path) -> PackedSource:
    packer: Any = object()
    return PackedSource(path, lambda: "key", 1, lambda memory: packer)


def test_of_two_loads_at_once_one_packs(
    model: Path, tmp_path: Path, packings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks are of open files: threads compete for them as processes do."""
    begin, waits = threading.Barrier(2), threading.Event()
    finish = weight_store.NewPackedFile.finish

    def pause(_: float) -> None:
        waits.set()
        threading.Event().wait(0.01)

    def finish_later(self: weight_store.NewPackedFile) -> None:
        assert waits.wait(20), "the other load waits for this one"
        finish(self)

    monkeypatch.setattr(weight_store.NewPackedFile, "finish", finish_later)
    monkeypatch.setattr("libs.engine.packed.shared_weights.time.sleep", pause)

    def run(_: int) -> torch.Tensor:
        begin.wait(60)
        return logits(load(model, tmp_path / "packed"))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert torch.equal(first, second) and torch.equal(first, logits(load(model, None)))
    assert len(packings) == 1


def test_no_process_writes_to_the_pages_that_others_map(model: Path, tmp_path: Path) -> None:
    load(model, tmp_path / "packed")
    path = only_file(tmp_path / "packed")
    index = packed_file._read_index(os.open(path, os.O_RDONLY))
    opened = packed_file.open_packed_file(path, lambda: index.key, lambda n_bytes: None)
    tensor = opened.tensor(index.tensors["norm.weight"])
    if (pid := os.fork()) == 0:
        faulthandler.disable()
        tensor[0] = 5.0  # SIGSEGV
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0
    text = Path("/proc/self/maps").read_text()
    mapped = [line.split()[1] for line in text.splitlines() if str(path) in line]
    assert mapped and not [rights for rights in mapped if "w" in rights]
