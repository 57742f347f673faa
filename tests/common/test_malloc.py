import subprocess
import sys

import pytest

from libs.common.malloc import keep_freed_memory

# Blocks of a size that glibc would give back each time; what the kernel counts are fresh pages.
_PROGRAM = """
import resource, sys
from libs.common.malloc import keep_freed_memory
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


def faults(mode: str) -> str:
    command = [sys.executable, "-c", _PROGRAM, mode]
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # no adapting: what a block of 1 MiB costs at first
    if mode == "keep":
        environment = {}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    return ran.stdout.strip()


def test_freed_blocks_are_used_again() -> None:
    kept = faults("keep")
    if kept == "no glibc":
        pytest.skip("the C library has no mallopt")
    assert int(kept) < 100 < int(faults("default"))


def test_it_says_whether_it_could() -> None:
    assert keep_freed_memory(64 << 20) in (True, False)
