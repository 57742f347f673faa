"""Host names that a test adds while its processes run. They end in `.test`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.faults.shim import compile_shim

_SOURCE = Path(__file__).with_name("names_shim.c")


class LateNames:
    """The names that processes with this `environment` can resolve, beside all real ones."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "names"
        self._known: dict[str, str] = {}
        library = folder / "names_shim.so"
        compile_shim(_SOURCE, library)
        self._file.write_text("")
        # gRPC's other resolver does not ask the C library.
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "NAMES_SHIM_FILE": str(self._file),
            "GRPC_DNS_RESOLVER": "native",
        }

    def add(self, name: str, address: str) -> None:
        """Let `name` resolve from now on. A reader sees the old file or the new one."""
        self._known[name] = address
        written = self._file.with_suffix(".new")
        written.write_text("".join(f"{known} {known_at}\n" for known, known_at in self._known.items()))
        written.replace(self._file)
