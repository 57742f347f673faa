"""A link that delivers each byte a fixed time after it was sent, however many are on their way.

It runs in another process, so that its work is not that of the ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

_CHUNK_BYTES = 256 << 10
_CHUNKS_ON_THE_WAY = 256


@contextlib.contextmanager
def delayed_links(ports: Sequence[int], delay_s: float) -> Iterator[list[int]]:
    """Ports that lead to these ports of 127.0.0.1, `delay_s` each way; the ports themselves without delay."""
    if not delay_s:
        yield list(ports)
        return
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, ports, delay_s))
    process.start()
    try:
        yield pipe.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, ports: Sequence[int], delay_s: float) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ports]
    for listener, port in zip(listeners, ports, strict=True):
        threading.Thread(target=_accept, args=(listener, port, delay_s), daemon=True).start()
    pipe.send([listener.getsockname()[1] for listener in listeners])
    threading.Event().wait()


def _accept(listener: socket.socket, port: int, delay_s: float) -> None:
    while True:
        caller, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for end, other in ((caller, server), (server, caller)):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            way: queue.Queue[tuple[float, bytes]] = queue.Queue(_CHUNKS_ON_THE_WAY)
            threading.Thread(target=_receive, args=(end, way, delay_s), daemon=True).start()
            threading.Thread(target=_send, args=(other, way), daemon=True).start()


def _receive(end: socket.socket, way: queue.Queue[tuple[float, bytes]], delay_s: float) -> None:
    data = b"more"
    while data:
        try:
            data = end.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        way.put((time.monotonic() + delay_s, data))


def _send(end: socket.socket, way: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due_s, data = way.get()
        time.sleep(max(due_s - time.monotonic(), 0.0))
        with contextlib.suppress(OSError):
            if not data:
                end.shutdown(socket.SHUT_WR)
                return
            end.sendall(data)
