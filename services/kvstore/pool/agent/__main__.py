"""python -m services.kvstore.pool.agent: a node's client of the Mooncake Store pool, in a process of its own.

The client crashes its process when it is misused and holds the interpreter for a minute when its master is
away, and a call that hangs cannot be ended. Here all of that costs the node a cache: it kills the agent
and starts another. Values pass through shared memory, words through a socket pair (`pool/protocol.py`).
The agent ends when its node does.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from services.kvstore.pool.agent.client_guard import NO_SPACE, ClientGuard, connect
from services.kvstore.pool.agent.inventory_client import InventoryClient
from services.kvstore.pool.agent.node_readers import NodeReaders
from services.kvstore.pool.agent.protocol import keys_of, packed, unpacked
from services.kvstore.pool.agent.staging import Extent, SharedMemory
from services.kvstore.pool.fetch import Fetcher
from services.kvstore.pool.value import HEADER_BYTES, NAME_PREFIX, name_of, open_value
from slipstream.errors import FailedPrecondition, SlipstreamError, Unavailable

# Threads of each kind of call: puts that hang keep no get waiting, gets no question.
THREADS = {"find": 2, "drop": 1, "clear": 1, "get": 4, "put": 2, "list": 1, "heads": 1}
PUT_TRIES = 3
NOT_WHOLE = -2
CLOSE_WAIT_S = 1.5
_PR_SET_PDEATHSIG = 1


class Agent:
    """Answers its node until told to close."""

    def __init__(
        self,
        store: ClientGuard,
        open_engine: Callable[[], Any],
        memory: SharedMemory,
        peer: socket.socket,
        lister: InventoryClient,
    ) -> None:
        self._lister = lister
        self._store = store
        self._memory = memory
        self._peer = peer
        self._sending = threading.Lock()
        self._fetcher = Fetcher(store, NodeReaders(open_engine), memory)
        self._threads = {
            kind: ThreadPoolExecutor(count, thread_name_prefix=f"pool-{kind}")
            for kind, count in THREADS.items()
        }
        self._calls: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "find": self._find,
            "get": self._get,
            "put": self._put,
            "drop": self._drop,
            "clear": self._clear,
            "list": self._list,
            "heads": self._heads,
        }

    def serve(self) -> None:
        """Until the node says close or is gone."""
        self._say({"ready": self._store.name})
        with self._peer.makefile("rb") as lines:
            for line in lines:
                message = unpacked(line)
                if message["do"] == "close":
                    self._store.close(wait_s=CLOSE_WAIT_S)
                    return
                self._threads[message["do"]].submit(self._answer, message)

    def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            answer = self._calls[message["do"]](message)
        except SlipstreamError as error:
            answer = {"error": error.message}
        except Exception as error:  # a defect; this call fails, the agent goes on
            answer = {"error": repr(error)}
        hopeless = answer.pop("hopeless", None)
        late: list[Future[list[bool]]] = answer.pop("late_reads", [])
        self._say({"id": message["id"], **answer})
        if late:
            self._settle(message["id"], late)
        if hopeless:
            self._remove(hopeless)

    def _find(self, message: Mapping[str, Any]) -> dict[str, Any]:
        names = [name_of(key) for key in keys_of(message)]
        there = [name for name, held in zip(names, self._store.exist(names), strict=True) if held]
        replicas = self._store.replicas(there) if there else {}
        sizes = {name: copies[0].n_bytes for name, copies in replicas.items() if copies}
        return {"sizes": [sizes.get(name, 0) for name in names]}

    def _get(self, message: Mapping[str, Any]) -> dict[str, Any]:
        sizes = message["sizes"]
        extents = [Extent(at, n_bytes) for at, n_bytes in zip(message["at"], sizes, strict=True)]
        fetched = self._fetcher.fetch(keys_of(message), extents, sizes)
        return {
            "outcome": fetched.outcome,
            "late": bool(fetched.late),
            "late_reads": fetched.late,
            "failovers": fetched.failovers,
            "removed": len(fetched.hopeless),
            "hopeless": fetched.hopeless,
        }

    def _heads(self, message: Mapping[str, Any]) -> dict[str, Any]:
        extents = [Extent(at, HEADER_BYTES) for at in message["at"]]
        arrived, late = self._fetcher.heads(keys_of(message), extents)
        return {"arrived": arrived, "late": bool(late), "late_reads": late}

    def _put(self, message: Mapping[str, Any]) -> dict[str, Any]:
        keys, offsets, sizes = keys_of(message), message["at"], message["sizes"]
        outcome = [NOT_WHOLE] * len(keys)
        left = [
            index
            for index, key in enumerate(keys)
            if open_value(self._memory.view(offsets[index], sizes[index]), key) is not None
        ]
        for _ in range(PUT_TRIES):  # each picks another node; one that is dead fails it
            if not left:
                break
            codes = self._store.put(
                [name_of(keys[index]) for index in left],
                [self._memory.address + offsets[index] for index in left],
                [sizes[index] for index in left],
            )
            for index, code in zip(left, codes, strict=True):
                outcome[index] = code
            left = [index for index in left if outcome[index] not in (0, NO_SPACE)]
        return {"outcome": outcome}

    def _drop(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"dropped": sum(self._store.remove([name_of(key) for key in keys_of(message)]))}

    def _clear(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"dropped": self._store.remove_all_named(f"^{NAME_PREFIX}.*")}

    def _list(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            new, gone, more = self._lister.changes(whole=message["whole"])
        except (OSError, ValueError) as error:
            return {"unlisted": str(error)}  # the pool works without
        try:
            segments = self._lister.segments()
        except (OSError, ValueError):
            segments = []  # the list works without
        return {
            "new": [key.hex() for key in new],
            "gone": [key.hex() for key in gone],
            "more": more,
            "segments": segments,
        }

    def _settle(self, number: int, late: list[Future[list[bool]]]) -> None:
        left = threading.Semaphore(0)
        for read in late:
            read.add_done_callback(lambda _: left.release())

        def tell() -> None:
            for _ in late:
                left.acquire()
            self._say({"settled": number})

        threading.Thread(target=tell, daemon=True, name="pool-settle").start()

    def _remove(self, names: list[str]) -> None:
        try:
            self._store.remove(names)
        except (Unavailable, FailedPrecondition):
            return  # the master is gone or we are; the values go with it

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._sending:
            self._peer.sendall(packed(message))


def end_with(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it ends. Exits when that has happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit("the node is gone")


def _open_engine(options: argparse.Namespace, memory: SharedMemory) -> Any:
    """An engine to read with. Raises Unavailable."""
    from mooncake.engine import TransferEngine

    engine: Any = TransferEngine()
    if engine.initialize(options.host, "P2PHANDSHAKE", options.protocol, options.devices) != 0:
        raise Unavailable("the transfer engine does not start")
    if engine.register_memory(memory.address, memory.n_bytes) != 0:
        raise Unavailable("the transfer engine does not register memory")
    return engine


def main() -> None:
    """Set up, serve, and end without a destructor: those of the engine may hang."""
    parser = argparse.ArgumentParser(prog="python -m services.kvstore.pool.agent")
    for name in ("node-pid", "socket-fd", "memory-fd", "memory-bytes", "segment-bytes", "replicas"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("host", "master", "protocol", "devices", "admin"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    end_with(options.node_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the node's to handle
    peer = socket.socket(fileno=options.socket_fd)
    memory = SharedMemory(options.memory_bytes, fd=options.memory_fd)
    try:
        store = connect(
            host=options.host,
            master=options.master,
            segment_bytes=options.segment_bytes,
            replicas=options.replicas,
            protocol=options.protocol,
            devices=options.devices,
        )
        store.register(memory.address, memory.n_bytes)
        lister = InventoryClient(options.admin.split(",") if options.admin else ())
        Agent(store, lambda: _open_engine(options, memory), memory, peer, lister).serve()
    except SlipstreamError as error:
        peer.sendall(packed({"error": error.message}))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
