"""Compiles the C libraries of slipstream-server: the engine's kernels and the KV store's disk I/O.

    python server/native_build.py     builds what does not match its sources, beside the modules that load it

The wheel's build and editable installs call `compile_library` (server/setup.py), so a C compiler is needed
then and not where the services run. The kernels are built once for each level of processor, without
-march=native; `libs.engine.kernels.library` loads the one for the processor it finds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SHARED = ("-O3", "-pthread", "-fPIC", "-shared")
# No -ffast-math: masks are infinities. Products and sums do contract to fused multiply-adds.
_KERNELS: tuple[str, ...] = (*_SHARED, "-ffp-contract=fast", "-fno-math-errno")
# Levels of x86-64 by what is compiled for them: SSE4.2, AVX2 with FMA, AVX-512.
_X86_FLAGS = {
    2: ("-msse4.2", "-mpopcnt"),
    3: ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt"),
    4: ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"),
}
_COMPILE_TIMEOUT_S = 600.0


class BuildFailed(Exception):
    """A library could not be compiled; the message holds the compiler's words."""


@dataclass(frozen=True)
class NativeLibrary:
    """One shared library: all C sources of `csrc` beside the module, compiled in one call."""

    module: str  # its place among the packages; the file is the module's path with the suffix .so
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file, relative to the root of the packages."""
        return Path(*self.module.split(".")).with_suffix(".so")

    @property
    def source_dir(self) -> Path:
        """Where the C sources lie."""
        return ROOT / self.path.parent / "csrc"

    def digest(self) -> str:
        """Of the sources, their names and the flags."""
        found = hashlib.sha256(repr(self.flags).encode())
        for path in sorted(self.source_dir.iterdir()):
            found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()

    def is_current(self) -> bool:
        """Whether the library in the source tree was compiled from these sources with these flags."""
        output = ROOT / self.path
        try:
            return output.exists() and output.with_suffix(".digest").read_text() == self.digest()
        except FileNotFoundError:
            return False

    def write_digest(self) -> None:
        """Record beside the library in the source tree what it was compiled from."""
        (ROOT / self.path).with_suffix(".digest").write_text(self.digest())


def libraries(machine: str | None = None) -> list[NativeLibrary]:
    """What is built for a machine, such as x86_64 or aarch64 (this one by default)."""
    kernels = "libs.engine.kernels._kernels"
    if (machine or platform.machine()).lower() in ("x86_64", "amd64"):
        found, flags = [], _KERNELS
        for level, added in _X86_FLAGS.items():
            flags += added
            found.append(NativeLibrary(f"{kernels}_x86_64_v{level}", flags))
    else:
        found = [NativeLibrary(f"{kernels}_generic", _KERNELS)]
    return [*found, NativeLibrary("services.kvstore.disk.native._disk_io", _SHARED)]


def compile_library(library: NativeLibrary, output: Path) -> None:
    """Compile into `output`, which appears whole or not at all. Raises BuildFailed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_suffix(f".{os.getpid()}.tmp")
    sources = sorted(library.source_dir.glob("*.c"))
    command = [_compiler(), *library.flags, *map(str, sources), "-o", str(unfinished), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
        unfinished.replace(output)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise BuildFailed(f"{library.module} does not compile: {detail}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def build_in_place(wanted: Iterable[NativeLibrary]) -> None:
    """Compile each into the source tree, side by side. Raises BuildFailed."""

    def build(library: NativeLibrary) -> None:
        compile_library(library, ROOT / library.path)
        library.write_digest()

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(build, wanted))


def _compiler() -> str:
    """The C compiler that CC names, or the system's."""
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildFailed("no C compiler found: install gcc or clang, or name one in CC")


def main() -> int:
    """Build what is out of date."""
    outdated = [library for library in libraries() if not library.is_current()]
    try:
        build_in_place(outdated)
    except BuildFailed as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    for library in outdated:
        print(f"slipstream: compiled {library.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
