"""The death of a rank, which gloo of this process has seen on return."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

WAIT_S = 100.0


def kill_rank(rank: subprocess.Popen[str]) -> None:
    """Kill it, and wait until gloo has closed all connections to it.

    Gloo forgets a send that meets the end of a connection before gloo's thread does: such a send waits
    forever. A worker ends by the named death also then.
    """
    connections = _connections(os.getpid(), rank.pid)
    assert connections
    rank.kill()
    deadline_s = time.monotonic() + WAIT_S
    while connections & _sockets(os.getpid()):
        assert time.monotonic() < deadline_s, "gloo keeps connections to a dead rank"
        time.sleep(0.001)


def _connections(pid: int, peer: int) -> set[int]:
    """The inodes of the sockets of one process that are connected with those of the other."""
    ends = {
        int(row[9]): (row[1], row[2])
        for name in ("tcp", "tcp6")
        for row in map(str.split, Path(f"/proc/self/net/{name}").read_text().splitlines()[1:])
    }
    of_peer = {ends[inode][0] for inode in _sockets(peer) & ends.keys()}
    return {inode for inode in _sockets(pid) & ends.keys() if ends[inode][1] in of_peer}


def _sockets(pid: int) -> set[int]:
    """The inodes of the sockets of a process."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kind, _, inode = os.readlink(descriptor).partition(":")
        except FileNotFoundError:  # closed meanwhile
            continue
        if kind == "socket":
            found.add(int(inode.strip("[]")))
    return found
