"""Compiles C sources once per machine, compiler and source, into a cache that only this user can write."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILE_TIMEOUT_S = 300.0


def find_compiler() -> str | None:
    """The system's C compiler, or the one that CC names; None when there is none."""
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    return None


def compiled(compiler: str, source_dir: Path, *, name: str, flags: Sequence[str]) -> Path:
    """Path of the shared library of all C sources of a directory, for this compiler and processor.

    Raises OSError and subprocess.SubprocessError, whose stderr tells why.
    """
    target = _cache_dir() / f"{name}-{_key(compiler, source_dir, flags)}.so"
    if target.exists():
        return target
    # Built beside the target and renamed: processes that start together never load half a file.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        output = Path(work) / target.name
        sources = sorted(source_dir.glob("*.c"))
        command = [compiler, *flags, *map(str, sources), "-o", str(output), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        output.replace(target)
    return target


def _key(compiler: str, source_dir: Path, flags: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(source_dir.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30.0).stdout
    for part in (compiler.encode(), version, " ".join(flags).encode(), _processor().encode()):
        digest.update(part + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """What -march=native depends on: the architecture and, on Linux, model and feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line for line in lines if line.split(":")[0].strip() in wanted}
    return platform.machine() + "\n".join(found.values())


def _cache_dir() -> Path:
    """A directory only this user can write, as what lies there is loaded as code; else a new one."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "slipstream" / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.stat()
        if os.access(path, os.W_OK) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="slipstream-kernels-"))
