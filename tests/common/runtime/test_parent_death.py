"""A process that ends with its parent."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from tests.support.processes.process_checks import alive, all_gone

_CHILD = """
import sys, time
from libs.common.runtime.parent_death import end_with_parent
end_with_parent(int(sys.argv[1]))
print("guarded", flush=True)
time.sleep(300)
"""
# Ends without a word to its child, once the child is guarded.
_PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"guarded\\n"
print(child.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


async def test_a_process_ends_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PARENT, _CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(100):
        assert parent.stdout is not None
        child = int(await parent.stdout.readline())
        assert alive(child)
        await parent.communicate(b"")
    await all_gone([child])


def test_a_process_without_its_parent_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, "1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == "the parent process has ended"
