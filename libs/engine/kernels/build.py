"""Compiles the C kernels once per machine and source, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
# No -ffast-math: masks are infinities. Products and sums do contract to fused multiply-adds.
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 300.0


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, compiled on first use; None, after one log line, where that is not possible."""
    compiler = _find_compiler()
    if compiler is None:
        logger.warning("no C compiler found: the engine runs on plain torch, several times slower")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("C kernels not usable, falling back to plain torch (several times slower): %s", detail)
        return None


def _find_compiler() -> str | None:
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    return None


def _compiled(compiler: str) -> Path:
    """Path of the shared library for these sources, this compiler and this processor."""
    sources = sorted(SOURCE_DIR.glob("*.c"))
    target = _cache_dir() / f"engine-{_key(compiler)}.so"
    if target.exists():
        return target
    # Built beside the target and renamed: processes that start together never load half a file.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        output = Path(work) / target.name
        command = [compiler, *FLAGS, *map(str, sources), "-o", str(output), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        output.replace(target)
    return target


def _key(compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30.0).stdout
    for part in (compiler.encode(), version, " ".join(FLAGS).encode(), _processor().encode()):
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
