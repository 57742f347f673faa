"""A disk in memory for the disk tier; it records each operation.

`crash_images` gives the states of such a disk after a power loss at any point of its log: all synced bytes,
and any part of the others in any order, torn at sectors.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. A sync makes the operations before `upto` durable. `file` identifies the file
    itself, since a name may be created again."""

    kind: str  # create, allocate, write, sync, sync_directory, unlink, mark
    name: str = ""
    file: int = 0
    offset: int = 0
    data: bytes = b""
    upto: int = 0
    mark: object = None


class MemoryDisk:
    """A `DiskIo`. Names are file names without the directory."""

    direct = True

    def __init__(self, files: dict[str, bytearray] | None = None, *, record: bool = True) -> None:
        self.files = files if files is not None else {}
        self.log: list[Op] = []
        self.failing: dict[str, int] = {}  # call -> errno
        self.before: Callable[[str], None] = lambda call: None  # may hang or raise
        self._record = record
        self._fds: dict[int, str] = {}
        self.numbers = {name: number for number, name in enumerate(self.files)}
        self._n_created = len(self.files)
        self._next_fd = 1000
        self._lock = threading.RLock()

    @property
    def n_open(self) -> int:
        """Descriptors that are still open."""
        return len(self._fds)

    def mark(self, what: object) -> None:
        """Append a mark to the log."""
        self._note(Op("mark", mark=what))

    def lock_directory(self, directory: Path) -> int:
        return self._new_fd("lock")

    def segments(self, directory: Path) -> list[Path]:
        return [directory / name for name in sorted(self.files) if name.startswith("segment-")]

    def open(self, path: Path, *, create: bool = False) -> int:
        self._call("open")
        with self._lock:
            if create:
                self.files[path.name] = bytearray()
                self._n_created += 1
                self.numbers[path.name] = self._n_created
                self._note(Op("create", path.name, self._n_created))
            elif path.name not in self.files:
                raise FileNotFoundError(errno.ENOENT, path.name)
            return self._new_fd(path.name)

    def n_bytes(self, fd: int) -> int:
        return len(self.files[self._fds[fd]])

    def fallocate(self, fd: int, n_bytes: int) -> None:
        self._call("fallocate")
        with self._lock:
            name = self._fds[fd]
            self.files[name].extend(bytes(n_bytes - len(self.files[name])))
            self._note(Op("allocate", name, self.numbers[name], n_bytes))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call("preadv")
        image, start = memoryview(self.files[self._fds[fd]]), offset
        for buffer in buffers:
            piece = image[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            offset += len(piece)
        return offset - start

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call("pwritev")
        data = b"".join(bytes(buffer) for buffer in buffers)
        with self._lock:
            name = self._fds[fd]
            write_at(self.files[name], offset, data)
            self._note(Op("write", name, self.numbers[name], offset, data))
        return len(data)

    def fdatasync(self, fd: int) -> None:
        upto, name = len(self.log), self._fds[fd]
        self._call("fdatasync")
        self._note(Op("sync", name, self.numbers[name], upto=upto))

    def sync_directory(self, directory: Path) -> None:
        upto = len(self.log)
        self._call("sync_directory")
        self._note(Op("sync_directory", upto=upto))

    def unlink(self, path: Path) -> None:
        with self._lock:
            if self.files.pop(path.name, None) is not None:
                self._note(Op("unlink", path.name, self.numbers.pop(path.name)))

    def close(self, fd: int) -> None:
        with self._lock:
            del self._fds[fd]

    def _call(self, call: str) -> None:
        self.before(call)
        if call in self.failing:
            raise OSError(self.failing[call], f"injected into {call}")

    def _new_fd(self, name: str) -> int:
        with self._lock:
            self._next_fd += 1
            self._fds[self._next_fd] = name
            return self._next_fd

    def _note(self, op: Op) -> None:
        if self._record and op.name != "probe":
            with self._lock:
                self.log.append(op)


def write_at(image: bytearray, offset: int, data: bytes) -> None:
    """Write into a file's image, which grows as needed."""
    if len(image) < offset + len(data):
        image.extend(bytes(offset + len(data) - len(image)))
    image[offset : offset + len(data)] = data


class Durable:
    """The durable and the pending state of the disk at one point of the log.

    A file's sync makes its bytes and size durable, the directory's sync the names.
    """

    def __init__(self, files: dict[str, bytearray]) -> None:
        self._names = {name: number for number, name in enumerate(files)}
        self._contents = {number: bytearray(data) for number, data in enumerate(files.values())}
        self.pending: list[tuple[int, Op]] = []  # by position in the log

    def apply(self, position: int, op: Op) -> None:
        """Apply the next operation."""
        if op.kind in ("create", "allocate", "write", "unlink"):
            self.pending.append((position, op))
            self._contents.setdefault(op.file, bytearray())
        elif op.kind == "sync":
            self._make_durable(
                lambda each: each.file == op.file and each.kind in ("allocate", "write"), op.upto
            )
        elif op.kind == "sync_directory":
            self._make_durable(lambda each: each.kind in ("create", "unlink"), op.upto)

    def image(self, rng: random.Random, *, keep: float, tear: float) -> dict[str, bytearray]:
        """Return durable files plus pending writes, each with probability `keep`, in any order."""
        names = dict(self._names)
        contents = {number: bytearray(self._contents[number]) for number in names.values()}
        writes = []
        metadata = True  # metadata is journalled: a prefix of it survives
        for _, op in self.pending:
            if op.kind == "write":
                writes.append(op)
            elif metadata := metadata and rng.random() < keep:
                if op.kind == "create":
                    contents.setdefault(op.file, bytearray(self._contents[op.file]))
                apply_to(names, contents, op)
        rng.shuffle(writes)
        for op in writes:
            if op.file in contents and rng.random() < keep:
                apply_to(names, contents, torn(op, rng) if rng.random() < tear else op)
        return {name: contents[number] for name, number in names.items()}

    def _make_durable(self, is_synced: Callable[[Op], bool], upto: int) -> None:
        left = []
        for position, op in self.pending:
            if position < upto and is_synced(op):
                apply_to(self._names, self._contents, op)
            else:
                left.append((position, op))
        self.pending = left


def apply_to(names: dict[str, int], contents: dict[int, bytearray], op: Op) -> None:
    """Apply the operation to names and files."""
    if op.kind == "create":
        names[op.name] = op.file
    elif op.kind == "unlink":
        if names.get(op.name) == op.file:
            del names[op.name]
    elif op.kind == "allocate":
        image = contents.setdefault(op.file, bytearray())
        image.extend(bytes(max(0, op.offset - len(image))))
    else:
        write_at(contents[op.file], op.offset, op.data)


def torn(op: Op, rng: random.Random) -> Op:
    """Return the write with only some of its sectors: a run from its start or its end."""
    n_sectors = len(op.data) // SECTOR_BYTES
    cut = rng.randrange(n_sectors + 1) * SECTOR_BYTES
    if rng.random() < 0.5:
        return Op("write", op.name, op.file, op.offset, op.data[:cut])
    return Op("write", op.name, op.file, op.offset + cut, op.data[cut:])


def crash_images(
    log: Sequence[Op], start: dict[str, bytearray], rng: random.Random, *, per_cut: int
) -> Iterator[tuple[int, dict[str, bytearray]]]:
    """Yield (cut, files): possible states of the disk if the power fails after `cut` operations."""
    durable = Durable(start)
    for cut, op in enumerate(log, start=1):
        durable.apply(cut - 1, op)
        if op.kind == "mark":
            continue
        yield cut, durable.image(rng, keep=0.0, tear=0.0)
        if durable.pending:
            yield cut, durable.image(rng, keep=1.0, tear=0.0)
            for _ in range(per_cut - 2):
                yield cut, durable.image(rng, keep=rng.choice((0.2, 0.5, 0.8)), tear=0.4)
