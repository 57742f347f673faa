"""The other end of the bare readers: a process with memory that Mooncake and one socket can read.

    python -m bench.kvstore.peer MEMORY_BYTES BATCH_BYTES

Prints one JSON line and serves until its standard input ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from libs.common.transport.mooncake import engine_environment
from libs.common.transport.registered_memory import PageAlignedMemory


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Where the memory is: by Mooncake's session id and address, and by a TCP port."""

    session: str
    address: int
    port: int


@contextmanager
def spawn_peer(memory_bytes: int, batch_bytes: int) -> Iterator[PeerMemory]:
    """A peer process, ended on leaving."""
    command = [sys.executable, "-m", "bench.kvstore.peer", str(memory_bytes), str(batch_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield PeerMemory(**json.loads(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


def main(memory_bytes: int, batch_bytes: int) -> None:
    """Serve."""
    os.environ.update(engine_environment("127.0.0.1"))
    from mooncake.engine import TransferEngine

    memory = PageAlignedMemory(memory_bytes)
    for start in range(0, memory_bytes, batch_bytes):
        memory.view(start, batch_bytes)[:] = os.urandom(batch_bytes)
    engine: Any = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.address, memory.n_bytes) == 0
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while number := connection.recv(1):
            connection.sendall(memory.view(number[0] * batch_bytes, batch_bytes))

    threading.Thread(target=send, daemon=True).start()
    where = {
        "session": f"127.0.0.1:{engine.get_rpc_port()}",
        "address": memory.address,
        "port": listener.getsockname()[1],
    }
    print(json.dumps(where), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
