"""KV transport over Mooncake's Transfer Engine: metadata P2PHANDSHAKE, protocol tcp or rdma.

Facts this file relies on, measured with mooncake-transfer-engine-non-cuda 0.3.13.post1:

- Status 1 and -1 of one element are final: the engine no longer accesses its memory, provided that
  MC_TCP_PROGRESS_TIMEOUT_SEC and MC_TCP_STATUS_TIMEOUT_SEC end a stalled transfer. With the defaults
  a READ that was reported failed overwrote its destination later.
- An id must hold only one element: the status of an id is that of its first element. The reader stops polling
  an id once it ended: a stale id crashes the process, as does any use of an engine without initialize.
- Elements to one peer use LANES connections, further elements queue behind them. On a stalled peer each one
  waits for its own time-out and cannot be cancelled. So a reader submits at most LANES elements.
  (Beyond 2,048 outstanding elements per peer the engine fails some and performs others.)
- The sync calls and the batch status spin on a core; polling with a growing sleep costs a tenth.
- Over tcp one thread of an engine moves all its bytes, so there are two engines (multi_engine.py).
- Submitting an element to a peer that was reached before queues it and returns at once.
- The first contact with a stopped peer blocks for a minute and delays first contacts with other peers. So the
  reader asks the incarnation probe first. Only a peer that stops right after the probe still causes this.
- Over tcp, device memory moves through a copy in the host, 64 KiB at a time. Over rdma an engine built with
  CUDA moves it without a copy (read in its source; untested). Other builds treat any address as the host's.
- In a forked child the engine hangs, also in its destructor. So the child never destroys it.
- The engine has no close; dropping the last reference takes a second.
- Over tcp the reader's own memory needs no registration, and the engine refuses a peer's access to it.
- The engine's ports listen on all interfaces, whatever address it advertises. Any process that reaches them
  can read and write registered memory: docs/security.md has the rules for firewalls.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import logging
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from libs.common.transport.base import (
    Landed,
    ReadOp,
    Region,
    RegionTable,
    TransferRefused,
    TransferTimeout,
)
from libs.common.transport.incarnation_probe import IncarnationProbe
from libs.common.transport.mooncake_read import LANES, MooncakePeer, MooncakeRead
from libs.common.transport.multi_engine import TCP_RAILS, MultiEngine, note_of
from libs.common.transport.peers import PeerTransport
from libs.common.transport.rdma import usable_devices
from libs.common.transport.read_poller import ReadPoller
from libs.common.transport.tensor_memory import HOST

log = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 2
# How long a stopped transfer may take to end. The engine checks its time-outs about once a second.
STOP_TIMEOUT_S = PROGRESS_TIMEOUT_S + 2.0
# The wheel without CUDA. All wheels have the same modules, so only one of them can be installed.
_WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"


def engine_environment(host: str) -> dict[str, str]:
    """The environment variables that the engine reads when it is imported."""
    return {
        "MC_TCP_BIND_ADDRESS": host,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_TIMEOUT_S),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(PROGRESS_TIMEOUT_S),
        "MC_TRANSFER_TIMEOUT": "60",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_LANES_PER_PEER": str(LANES // TCP_RAILS),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(PROGRESS_TIMEOUT_S),
        "MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR"),
    }


def built_with_cuda() -> bool:
    """Whether the installed engine supports device memory.

    Other builds accept a device's address without an error, and crash when they read there.
    """
    return not any(importlib.metadata.distributions(name=_WITHOUT_CUDA))


class MooncakeTransport(PeerTransport[MooncakePeer]):
    """Implements KvTransport. The session id is `host:port/probe port/nonce`.

    `kind` is mooncake, or mooncake-rdma: the two protocols cannot read each other.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        bind: str = "",
        port: int = 0,
        protocol: str = "tcp",
        devices: Sequence[str] = (),
    ) -> None:
        """Peers dial `host`, which need not resolve yet; the probe listens on `bind` (HOST:PORT), by default
        on a free port of `host`. Peers dial the probe at `port`, by default the bound one.
        `protocol` is tcp or rdma. `devices` are names of RDMA devices; empty means all of them.

        Raises ImportError when the engine's libraries are missing, FailedPrecondition when a device is
        missing or unusable, TransferRefused when the engine does not start.
        """
        self.kind = "mooncake" if protocol == "tcp" else f"mooncake-{protocol}"
        self.devices = usable_devices(devices, os.environ) if protocol == "rdma" else ()
        os.environ.update(engine_environment(host))
        from mooncake.engine import TransferEngine

        super().__init__(stop_timeout_s=STOP_TIMEOUT_S)
        engines = [TransferEngine() for _ in range(TCP_RAILS if protocol == "tcp" else 1)]
        for engine in engines:
            if engine.initialize(host, "P2PHANDSHAKE", protocol, ",".join(self.devices)) != 0:
                raise TransferRefused(f"Mooncake does not start with {protocol} on {host}")
        self._engine: Any = MultiEngine(engines)
        ports = self._engine.ports
        log.warning(
            "Mooncake listens on all interfaces whatever address it is given (ports %s, others), and a "
            "process that reaches it reads and writes staged KV: close its ports as docs/security.md states",
            ", ".join(map(str, ports)),
        )
        self._probe = IncarnationProbe(bind or f"{host}:0", note=note_of(ports))
        self._calls = ThreadPoolExecutor(4, thread_name_prefix="kv-mooncake")
        self._poller = ReadPoller()
        self.session_id = f"{host}:{ports[0]}/{port or self._probe.port}/{self._probe.nonce.hex()}"
        _engines.add(self)

    def _make_peer(self, session_id: str) -> MooncakePeer:
        return MooncakePeer(session_id)

    async def close(self) -> None:
        if self._guard.closed:
            return
        self._guard.check()
        self._guard.closed = True
        await self._reads.close()
        self._probe.close()
        await asyncio.get_running_loop().run_in_executor(None, self._poller.close)
        engine, self._engine = self._engine, None
        _engines.discard(self)
        # The destructor of an engine waits for its threads to end, so it runs in a thread. Each list holds
        # the only reference to an engine, and `clear` drops it; a local variable would be a second reference.
        await asyncio.gather(*(asyncio.to_thread(holder.clear) for holder in [[e] for e in engine.detach()]))
        self._calls.shutdown(wait=False)
        self._regions = self._destinations = RegionTable()

    def _register(self, region: Region) -> None:
        if region.location == HOST:
            code = self._engine.register_memory(region.address, region.n_bytes)
        elif built_with_cuda():
            code = self._engine.register_memory(region.address, region.n_bytes, region.location)
        else:
            raise TransferRefused(
                f"memory of {region.location} needs a Mooncake built with CUDA, and this is {_WITHOUT_CUDA}: "
                "install mooncake-transfer-engine instead"
            )
        if code != 0:
            what = f"{region.n_bytes} bytes of {region.location}"
            raise TransferRefused(f"Mooncake does not register {what}: {code}{self._hint(region)}")

    def _check_destination(self, region: Region) -> None:
        if "rdma" in self.kind or region.location != HOST:
            where = "over rdma" if "rdma" in self.kind else f"on {region.location}"
            raise TransferRefused(f"Mooncake reads {where} into registered memory only")

    def _hint(self, region: Region) -> str:
        if "rdma" not in self.kind:
            return ""
        if region.location == HOST:
            return " (the limit of locked memory, ulimit -l, counts for rdma)"
        return " (rdma reaches device memory with nvidia-peermem or dma-buf)"

    async def _transfer(
        self, peer: MooncakePeer, reads: Sequence[ReadOp], landed: Landed | None, stop: asyncio.Event
    ) -> None:
        await peer.ensure_alive()
        # When all connections to a peer break together, as after a stall, each engine fails the next element
        # at once and opens new connections only then. So each engine may cost one try.
        for tries_left in range(0 if peer.reached else TCP_RAILS, -1, -1):
            read = MooncakeRead(self._engine, self._calls, peer, reads, landed, stop, self._destinations)
            await self._poller.run(read)
            if not read.failed or stop.is_set():
                break
            read.raise_error()
            await peer.ensure_alive_after_failure()
            reads = read.missing
            if not tries_left:
                raise TransferRefused(f"{peer.engine_address} is alive but refused or dropped the read")
        read.raise_error()
        if not read.complete:
            raise TransferTimeout(f"the read from {peer.engine_address} was stopped")


_engines: weakref.WeakSet[MooncakeTransport] = weakref.WeakSet()


def _leak_engines() -> None:
    """Add a reference to each engine in a forked child, so that no destructor runs there."""
    for transport in _engines:
        if transport._engine is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport._engine))


os.register_at_fork(after_in_child=_leak_engines)
