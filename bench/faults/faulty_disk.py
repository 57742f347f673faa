"""A directory whose disk hangs, fails or is slow on demand, for processes with a certain environment."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from types import TracebackType

from bench.faults.shim import compile_shim

_SOURCE = Path(__file__).with_name("disk_shim.c")
_KIND = struct.Struct("<iiii")  # as in the C source: fault, delay, waiting, affected
KINDS = ("open", "read", "write", "sync", "meta")
HANGS = -1


class FaultyDisk:
    """`with`: a process started inside the block with `environment` has this disk under `directory`."""

    def __init__(self, folder: Path, directory: Path) -> None:
        """`folder`: the shim's files, outside of `directory`."""
        self._library, self._file, self.directory = folder / "disk_shim.so", folder / "disk_faults", directory

    def __enter__(self) -> FaultyDisk:
        compile_shim(_SOURCE, self._library)
        self._file.write_bytes(bytes(_KIND.size * len(KINDS)))
        with self._file.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _KIND.size * len(KINDS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.heal()  # no call hangs after the test
        self._control.close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the process needs in its environment."""
        return {
            "LD_PRELOAD": str(self._library),
            "DISK_SHIM_FILE": str(self._file),
            "DISK_SHIM_PREFIX": str(self.directory),
        }

    def hang(self, *kinds: str) -> None:
        """Calls of these kinds (default: all) do not return until `heal`."""
        self._set(kinds, fault=HANGS)

    def fail(self, code: int, *kinds: str) -> None:
        """Calls of these kinds (default: all) fail with this errno."""
        self._set(kinds, fault=code)

    def slow(self, delay_s: float, *kinds: str) -> None:
        """Calls of these kinds (default: all) take `delay_s` longer."""
        self._set(kinds, delay_us=int(delay_s * 1e6))

    def heal(self) -> None:
        """End all faults; hanging calls continue."""
        for number in range(len(KINDS)):
            struct.pack_into("<ii", self._control, number * _KIND.size, 0, 0)

    def waiting(self, *kinds: str) -> int:
        """The number of calls that hang now."""
        return sum(self._read(kind)[2] for kind in kinds or KINDS)

    def bitten(self, *kinds: str) -> int:
        """The number of calls that hung or failed so far."""
        return sum(self._read(kind)[3] for kind in kinds or KINDS)

    def _set(self, kinds: tuple[str, ...], *, fault: int = 0, delay_us: int = 0) -> None:
        for kind in kinds or KINDS:
            struct.pack_into("<ii", self._control, KINDS.index(kind) * _KIND.size, fault, delay_us)

    def _read(self, kind: str) -> tuple[int, ...]:
        return _KIND.unpack_from(self._control, KINDS.index(kind) * _KIND.size)
