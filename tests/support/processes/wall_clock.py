"""A wall clock for the processes of a test, which the test sets while they run."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from types import TracebackType

from bench.faults.shim import compile_shim

_SOURCE = Path(__file__).with_name("clock_shim.c")


class WallClock:
    """`with`: every process started inside the block uses this clock, by its environment."""

    def __init__(self, folder: Path) -> None:
        self._library, self._file = folder / "clock_shim.so", folder / "offset"
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> WallClock:
        self.set(hours=0)
        compile_shim(_SOURCE, self._library)
        for name, value in (("LD_PRELOAD", self._library), ("CLOCK_SHIM_FILE", self._file)):
            self._before[name] = os.environ.get(name)
            os.environ[name] = str(value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, value in self._before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    def now_s(self) -> float:
        """The time of this clock, in seconds since 1970."""
        offset_ns: int = struct.unpack("<q", self._file.read_bytes())[0]
        return time.time() + offset_ns / 1e9

    def set(self, *, hours: float) -> None:
        """Move the clock of all processes to `hours` ahead of the machine's clock, or behind it."""
        data = struct.pack("<q", int(hours * 3600e9))
        if not self._file.exists():
            self._file.write_bytes(data)
            return
        # In place: the processes have this file mapped.
        descriptor = os.open(self._file, os.O_WRONLY)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)
