import platform
import subprocess
import sys
from pathlib import Path

from libs.common.runtime.malloc import use_large_pages

GLIBC = platform.libc_ver()[0] == "glibc"

# glibc returns blocks of this size to the kernel by default; page faults count the fresh pages.
_PROGRAM = """
import resource, sys
from libs.common.runtime.malloc import keep_freed_memory
keep = sys.argv[1] == "keep"
if keep and not keep_freed_memory(64 << 20):
    print("no glibc")
    raise SystemExit
def churn():
    for _ in range(100):
        bytearray(1 << 20)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

# Threads that allocate concurrently, as those of gRPC. glibc prints its arenas on standard output.
_THREADS = """
import ctypes, sys, threading
from libs.common.runtime.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory(64 << 20)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.malloc_info.argtypes = [ctypes.c_void_p], [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
together = threading.Barrier(25)
def churn():
    block = libc.malloc(1 << 20)
    together.wait()
    libc.free(block)
    together.wait()
threads = [threading.Thread(target=churn) for _ in range(24)]
for thread in threads:
    thread.start()
together.wait()
out = ctypes.c_void_p.in_dll(libc, "stdout")
libc.malloc_info(0, out)
libc.fflush(out)
together.wait()
"""

# Small objects, like most of an interpreter's heap, before and after they move.
_LARGE = """
from pathlib import Path
from libs.common.runtime.malloc import use_large_pages
kept = [bytes([n % 251]) * 400 for n in range(60_000)]
moved = use_large_pages()
large_kib = int(Path("/proc/self/smaps_rollup").read_text().split("AnonHugePages:")[1].split()[0])
print(moved, large_kib, all(text == bytes([n % 251]) * 400 for n, text in enumerate(kept)))
"""


def count_page_faults(mode: str) -> str:
    command = [sys.executable, "-c", _PROGRAM, mode]
    # A fixed threshold shows the cost of a 1 MiB block before glibc adapts.
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    if mode == "keep":
        environment = {}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    return ran.stdout.strip()


def test_freed_memory_is_kept_and_reused() -> None:
    kept = count_page_faults("keep")
    assert (kept != "no glibc") is GLIBC
    if GLIBC:
        assert int(kept) < 100 < int(count_page_faults("default"))


def count_arenas(mode: str) -> int:
    command = [sys.executable, "-c", _THREADS, mode]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={"MALLOC_ARENA_MAX": "16"}
    )
    return ran.stdout.count("<heap nr=")


def test_the_number_of_arenas_is_bounded_over_many_threads() -> None:
    if GLIBC:
        assert 1 <= count_arenas("keep") <= 8 < count_arenas("default")
    else:
        assert count_page_faults("keep") == "no glibc"  # only glibc has this setting


def test_existing_memory_moves_into_huge_pages_unchanged() -> None:
    command = [sys.executable, "-c", _LARGE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    moved, large_kib, unchanged = ran.stdout.split()
    assert unchanged == "True"
    assert int(large_kib) >= 2048 * int(moved)
    kernel = tuple(int(part) for part in platform.release().split(".")[:2])
    if kernel >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert int(moved) >= 1


def test_nothing_moves_without_a_maps_file(tmp_path: Path) -> None:
    assert use_large_pages(maps=tmp_path / "none") == 0


def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(b"7f0000000000-7f0000001000 rw-p 00000000 00:00 7 /tmp/\xff\x85 name\n")
    assert use_large_pages(maps=maps) == 0
