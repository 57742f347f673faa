"""python -m services.kvstore.pool.agent: a node's Mooncake Store client in its own process.

The client crashes its process when misused, and holds the interpreter for a minute when its master is
unavailable. A call that hangs cannot be cancelled. In its own process all of this costs the node only a
cache, since the node kills the agent and starts another. Values pass through shared memory, messages through
a socket pair (`protocol.py`). The agent ends with its node.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from libs.common.runtime.parent_death import end_with_parent
from libs.common.telemetry.logs import configure_logging
from services.kvstore.pool.agent.client_guard import NO_SPACE, ClientGuard, connect
from services.kvstore.pool.agent.fetch import Fetcher
from services.kvstore.pool.agent.inventory_client import InventoryClient
from services.kvstore.pool.agent.node_readers import NodeReaders
from services.kvstore.pool.agent.protocol import keys_of, packed, unpacked
from services.kvstore.pool.agent.staging import Extent, SharedMemory
from services.kvstore.pool.value import HEADER_BYTES, NAME_PREFIX, name_of, verify_value
from slipstream.errors import FailedPrecondition, SlipstreamError, Unavailable

# Threads for each kind of call, so that hanging puts block no get and hanging gets no lookup.
THREADS = {"find": 2, "drop": 1, "clear": 1, "get": 4, "put": 2, "list": 1, "headers": 1}
PUT_TRIES = 3
NOT_WHOLE = -2
CLOSE_WAIT_S = 1.5


class Agent:
    """Answers its node's calls until the node closes it."""

    def __init__(
        self,
        store: ClientGuard,
        open_engine: Callable[[], Any],
        memory: SharedMemory,
        peer: socket.socket,
        inventory_client: InventoryClient,
    ) -> None:
        self._inventory_client = inventory_client
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
            "headers": self._headers,
        }

    def serve(self) -> None:
        """Serve until the node sends close or is gone."""
        self._send({"ready": self._store.name})
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
        except Exception as error:  # a defect: only this call fails
            answer = {"error": repr(error)}
        unreadable = answer.pop("unreadable", None)
        late: list[Future[list[bool]]] = answer.pop("late_reads", [])
        self._send({"id": message["id"], **answer})
        if late:
            self._report_late_reads(message["id"], late)
        if unreadable:
            self._remove(unreadable)

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
            "removed": len(fetched.unreadable),
            "unreadable": fetched.unreadable,
        }

    def _headers(self, message: Mapping[str, Any]) -> dict[str, Any]:
        extents = [Extent(at, HEADER_BYTES) for at in message["at"]]
        arrived, late = self._fetcher.headers(keys_of(message), extents)
        return {"arrived": arrived, "late": bool(late), "late_reads": late}

    def _put(self, message: Mapping[str, Any]) -> dict[str, Any]:
        keys, offsets, sizes = keys_of(message), message["at"], message["sizes"]
        outcome = [NOT_WHOLE] * len(keys)
        left = [
            index
            for index, key in enumerate(keys)
            if verify_value(self._memory.view(offsets[index], sizes[index]), key) is not None
        ]
        for _ in range(PUT_TRIES):  # each try picks another node; a dead one fails it
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
            new, gone, more = self._inventory_client.changes(whole=message["whole"])
        except (OSError, ValueError) as error:
            return {"list_error": str(error)}  # the pool works without a list
        try:
            segments = self._inventory_client.segments()
        except (OSError, ValueError):
            segments = []  # the list works without segments
        return {
            "new": [key.hex() for key in new],
            "gone": [key.hex() for key in gone],
            "more": more,
            "segments": segments,
        }

    def _report_late_reads(self, number: int, late: list[Future[list[bool]]]) -> None:
        left = threading.Semaphore(0)
        for read in late:
            read.add_done_callback(lambda _: left.release())

        def report() -> None:
            for _ in late:
                left.acquire()
            self._send({"reads_ended": number})

        threading.Thread(target=report, daemon=True, name="pool-late-reads").start()

    def _remove(self, names: list[str]) -> None:
        try:
            self._store.remove(names)
        except (Unavailable, FailedPrecondition):
            return  # the master or this agent is gone, and the values with it

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending:
            self._peer.sendall(packed(message))


def _open_engine(options: argparse.Namespace, memory: SharedMemory) -> Any:
    """A new engine for reads. Raises Unavailable."""
    from mooncake.engine import TransferEngine

    engine: Any = TransferEngine()
    if engine.initialize(options.host, "P2PHANDSHAKE", options.protocol, options.devices) != 0:
        raise Unavailable("the transfer engine does not start")
    if engine.register_memory(memory.address, memory.n_bytes) != 0:
        raise Unavailable("the transfer engine does not register memory")
    return engine


def main() -> None:
    """Set up, serve, and exit without destructors: those of the engine may hang."""
    parser = argparse.ArgumentParser(prog="python -m services.kvstore.pool.agent")
    for name in ("node-pid", "socket-fd", "memory-fd", "memory-bytes", "segment-bytes", "replicas"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("host", "master", "protocol", "devices", "admin", "instance", "log-format"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    configure_logging("kvstore", options.instance, form=options.log_format)
    end_with_parent(options.node_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node handles Ctrl-C
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
        inventory_client = InventoryClient(options.admin.split(",") if options.admin else ())
        Agent(store, lambda: _open_engine(options, memory), memory, peer, inventory_client).serve()
    except SlipstreamError as error:
        peer.sendall(packed({"error": error.message}))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
