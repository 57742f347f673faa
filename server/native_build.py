"""Compiles the C libraries of slipstream-server: the engine's kernels and the KV store's disk I/O.

    python server/native_build.py     builds outdated libraries, next to the modules that load them

The wheel's build and editable installs call `compile_library` (server/setup.py), so machines that only run
the services need no C compiler. The kernels are built for each level of x86-64, without -march=native, and
`libs.engine.kernels.library` loads those for the running processor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SHARED = ("-O3", "-pthread", "-fPIC", "-shared")
# Without -ffast-math, because masks are infinities. Products and sums are contracted to fused multiply-adds.
_KERNELS: tuple[str, ...] = (*_SHARED, "-ffp-contract=fast", "-fno-math-errno")
# The flags that each variant for x86-64 adds: SSE4.2, AVX2 with FMA, AVX-512, bf16 pairs, bf16 tiles.
_X86_FLAGS = {
    "v2": ("-msse4.2", "-mpopcnt"),
    "v3": ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt"),
    "v4": ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"),
    "v4_bf16": ("-mavx512bf16",),
    "v4_amx": ("-mamx-tile", "-mamx-bf16"),
}
_COMPILE_TIMEOUT_S = 600.0


class BuildFailed(Exception):
    """A library could not be compiled. The message contains the compiler's output."""


@dataclass(frozen=True)
class NativeLibrary:
    """One shared library, compiled in one call from all C sources in `csrc` next to the module."""

    module: str  # its name in the package tree; the file has the module's path with the suffix .so
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file, relative to the root of the packages."""
        return Path(*self.module.split(".")).with_suffix(".so")

    @property
    def source_dir(self) -> Path:
        """The folder of the C sources."""
        return ROOT / self.path.parent / "csrc"

    def digest(self) -> str:
        """The digest of the sources, their names and the flags."""
        found = hashlib.sha256(repr(self.flags).encode())
        for path in sorted(self.source_dir.iterdir()):
            found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()

    def is_current(self) -> bool:
        """Whether the library in the source tree was compiled from these sources with these flags."""
        output = ROOT / self.path
        try:
            return output.exists() and output.with_suffix(".digest").read_text() == self.digest()
        except (OSError, ValueError):  # no record, or one that cannot be read
            return False

    def write_digest(self, digest: str) -> None:
        """Write the digest next to the library in the source tree. Raises BuildFailed."""
        try:
            (ROOT / self.path).with_suffix(".digest").write_text(digest)
        except OSError as error:
            raise BuildFailed(f"{self.module}: its digest cannot be written: {error}") from None


def libraries(machine: str | None = None) -> list[NativeLibrary]:
    """The libraries for a machine, such as x86_64 or aarch64 (this one by default)."""
    kernels = "libs.engine.kernels._kernels"
    if (machine or platform.machine()).lower() in ("x86_64", "amd64"):
        found, flags = [], _KERNELS
        for variant, added in _X86_FLAGS.items():
            flags += added
            found.append(NativeLibrary(f"{kernels}_x86_64_{variant}", flags))
    else:
        found = [NativeLibrary(f"{kernels}_generic", _KERNELS)]
    return [*found, NativeLibrary("services.kvstore.disk.native._disk_io", _SHARED)]


def compile_library(library: NativeLibrary, output: Path) -> str:
    """Compile into `output`, which appears whole or not at all. Raises BuildFailed.

    Returns the digest that the sources had before the compiler read them.
    """
    digest = library.digest()
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
    return digest


def build_in_place(wanted: Iterable[NativeLibrary]) -> None:
    """Compile the libraries into the source tree, in parallel. Raises BuildFailed."""

    def build(library: NativeLibrary) -> None:
        library.write_digest(compile_library(library, ROOT / library.path))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(build, wanted))


def _compiler() -> str:
    """The C compiler that CC names, or the system's."""
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildFailed("no C compiler found: install gcc or clang, or name one in CC")


@contextlib.contextmanager
def _only_build() -> Iterator[None]:
    """Wait for another build of this tree: set-up and `make native` run side by side under `make -j`."""
    tree = os.open(ROOT, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folder: then both builds compile, as whole files
            fcntl.flock(tree, fcntl.LOCK_EX)
        yield
    finally:
        os.close(tree)


def main() -> int:
    """Build what is out of date."""
    with _only_build():
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
