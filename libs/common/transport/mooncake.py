"""KV transport over Mooncake's Transfer Engine: metadata P2PHANDSHAKE, protocol tcp or rdma.

Facts this file relies on, measured with mooncake-transfer-engine-non-cuda 0.3.13.post1:

- Status 1 and -1 of one element are final: the engine touches its memory no more, provided that
  MC_TCP_PROGRESS_TIMEOUT_SEC and MC_TCP_STATUS_TIMEOUT_SEC end a stalled transfer. With the defaults
  a READ that was reported failed overwrote its destination later.
- Only one element per id: the status of an id tells of its first element. An id is asked after no more
  once it has ended: a stale id crashes the process, as does any use of an engine without initialize.
- Elements to one peer go over LANES connections, further ones queue behind them; each then waits out
  its own time-out on a stalled peer, and none can be called back. So no more than LANES are handed in.
  (Beyond 2,048 outstanding to a peer the engine fails some and performs others.)
- The sync calls and the batch status spin on a core; polling with a growing sleep costs a tenth.
- The first contact with a stopped peer blocks for a minute, and other peers' first contacts with it, so
  the beacon is asked before. A peer that stops in the instant between is the one case left.
- In a forked child the engine hangs, also in its destructor; so there it is never destroyed.
- The engine has no close; the last reference going takes a second.
- Its ports listen on all interfaces whatever it advertises: isolate the network.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libs.common.transport.base import (
    ProcessGuard,
    ReadOp,
    Region,
    RegionTable,
    TransferRefused,
    TransferTimeout,
)
from libs.common.transport.beacon import NONCE_BYTES, Beacon, BeaconAddress, greet
from libs.common.transport.reads import ReadSupervisor

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 2
# The engine looks at its time-outs about once a second.
SETTLE_S = PROGRESS_TIMEOUT_S + 2.0
LANES = 8
READS_PER_PEER = 2
ELEMENTS_PER_READ = LANES // READS_PER_PEER
# Large enough that a few keep the wire busy between polls, small enough to stop soon after a cancel.
ELEMENT_BYTES = 2 << 20
# Remembered peers; forgetting one costs a greeting.
MAX_PEERS = 256
RDMA_DEVICES = Path("/sys/class/infiniband")
_DONE, _FAILED = 1, -1
_POLL_MIN_S = 0.0001
# While the wire is busy the next element ends within a millisecond; a peer that stalls is asked seldom.
_POLL_BUSY_S = 0.0005
_POLL_MAX_S = 0.005
_BUSY_POLLS = 40


def engine_environment(host: str) -> dict[str, str]:
    """What the engine must find in the environment when it is imported."""
    return {
        "MC_TCP_BIND_ADDRESS": host,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_TIMEOUT_S),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(PROGRESS_TIMEOUT_S),
        "MC_TRANSFER_TIMEOUT": "60",
        "MC_TCP_LANES_PER_PEER": str(LANES),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(PROGRESS_TIMEOUT_S),
        "MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR"),
    }


def _check_rdma_devices(devices: Sequence[str]) -> None:
    """The engine itself starts without a word on devices that are not there, and then moves nothing."""
    there = sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    missing = [device for device in devices if device not in there]
    if missing or not there:
        raise TransferRefused(
            f"no RDMA device {', '.join(missing) or 'at all'} here; there are: {', '.join(there) or 'none'}"
        )


class MooncakeTransport:
    """Implements KvTransport. The session id is `host:port/beacon port/nonce`.

    `kind` is mooncake, or mooncake-rdma: the two protocols cannot read each other.
    """

    def __init__(
        self, host: str = "127.0.0.1", *, protocol: str = "tcp", devices: Sequence[str] = ()
    ) -> None:
        """`protocol` is tcp or rdma; `devices` are RDMA device names, none for all there are.

        Raises ImportError where the engine's libraries are missing, TransferRefused when it does not
        start or a device is not there.
        """
        self.kind = "mooncake" if protocol == "tcp" else f"mooncake-{protocol}"
        if protocol == "rdma":
            _check_rdma_devices(devices)
        os.environ.update(engine_environment(host))
        from mooncake.engine import TransferEngine

        self._guard = ProcessGuard(self.kind)
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ",".join(devices)) != 0:
            raise TransferRefused(f"Mooncake does not start with {protocol} on {host}")
        self._beacon = Beacon(host)
        self._regions = RegionTable()
        self._reads = ReadSupervisor(settle_s=SETTLE_S)
        self._calls = ThreadPoolExecutor(4, thread_name_prefix="kv-mooncake")
        self._peers: dict[str, _Peer] = {}
        port = self._engine.get_rpc_port()
        self.session_id = f"{host}:{port}/{self._beacon.address.port}/{self._beacon.address.nonce.hex()}"
        _engines.add(self)

    @property
    def reads_in_flight(self) -> int:
        return self._reads.in_flight

    @property
    def quarantined_bytes(self) -> int:
        return self._reads.quarantined_bytes

    def register(self, buffer: Buffer | Region) -> Region:
        self._guard.check()
        region = self._regions.add(buffer)
        if self._engine.register_memory(region.address, region.n_bytes) != 0:
            raise TransferRefused(f"Mooncake does not register {region.n_bytes} bytes")
        return region

    def quarantined(self, address: int, n_bytes: int) -> bool:
        return self._reads.quarantined(address, n_bytes)

    async def read(self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float) -> None:
        self._guard.check()
        self._reads.check_destinations(reads, self._regions)
        if not reads:
            return
        peer = self._peers.setdefault(session_id, _Peer(session_id))
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        await self._reads.run(
            lambda stop: self._transfer(peer, reads, stop), reads, slots=peer.slots, timeout_s=timeout_s
        )

    async def close(self) -> None:
        if self._guard.closed:
            return
        self._guard.check()
        self._guard.closed = True
        await self._reads.close()
        self._beacon.close()
        engine, self._engine = self._engine, None
        _engines.discard(self)
        holder = [engine]
        del engine
        await asyncio.get_running_loop().run_in_executor(None, holder.clear)
        self._calls.shutdown(wait=False)
        self._regions = RegionTable()

    async def _transfer(self, peer: _Peer, reads: Sequence[ReadOp], stop: asyncio.Event) -> None:
        await peer.ensure_alive()
        waiting = deque(split_reads(reads, ELEMENT_BYTES))
        outstanding: set[int] = set()
        failed = False
        while outstanding or waiting:
            if waiting and not failed and not stop.is_set():
                free = ELEMENTS_PER_READ - len(outstanding)
                wave = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                ids = await self._submit(peer, wave)
                outstanding.update(ids)
                failed = len(ids) < len(wave)
            elif not outstanding:
                break
            failed |= await self._poll(outstanding, down_to=ELEMENTS_PER_READ // 2 if waiting else 0)
        if failed and not stop.is_set():
            await peer.explain_failure()
        if failed or waiting:
            raise TransferTimeout(f"the read from {peer.engine_address} was stopped")

    async def _submit(self, peer: _Peer, wave: Sequence[ReadOp]) -> list[int]:
        """Hand elements to the engine; fewer ids than elements when it refuses one.

        In a thread, because the engine's first contact with a peer blocks.
        """
        engine = self._engine
        regions = self._regions

        def call() -> list[int]:
            ids: list[int] = []
            assert regions  # the buffers outlive this call, whatever closes meanwhile
            for op in wave:
                found = engine.batch_transfer_async_read(
                    peer.engine_address, [op.local_address], [op.remote_address], [op.n_bytes]
                )
                if not 0 < found < 1 << 63:  # 0 or -1: refused
                    break
                ids.append(found)
            return ids

        return await asyncio.get_running_loop().run_in_executor(self._calls, call)

    async def _poll(self, outstanding: set[int], *, down_to: int) -> bool:
        """Wait until at most `down_to` elements are outstanding, or one has failed; returns whether."""
        sleep_s, in_vain = _POLL_MIN_S, 0
        while True:
            statuses = {element: self._engine.transfer_check_status(element) for element in outstanding}
            ended = {element for element, status in statuses.items() if status in (_DONE, _FAILED)}
            outstanding -= ended
            if _FAILED in statuses.values():
                return True
            if len(outstanding) <= down_to:
                return False
            in_vain = 0 if ended else in_vain + 1
            longest_s = _POLL_BUSY_S if in_vain < _BUSY_POLLS else _POLL_MAX_S
            sleep_s = _POLL_MIN_S if ended else min(sleep_s * 2, longest_s)
            await asyncio.sleep(sleep_s)


class _Peer:
    """One incarnation of a peer: whether it was seen alive, and its bound on concurrent reads."""

    def __init__(self, session_id: str) -> None:
        try:
            self.engine_address, beacon_port, nonce = session_id.split("/")
            host, port = self.engine_address.rsplit(":", 1)
            self.beacon = BeaconAddress(host, int(beacon_port), bytes.fromhex(nonce))
            valid = 0 < int(port) < 65536 and len(self.beacon.nonce) == NONCE_BYTES
        except ValueError:
            valid = False
        if not valid:
            raise TransferRefused("not a session id of the mooncake transport")
        self.slots = asyncio.Semaphore(READS_PER_PEER)
        self.seen_alive = False

    async def ensure_alive(self) -> None:
        """Ask the beacon at first contact and after each failure."""
        if not self.seen_alive:
            await greet(self.beacon)
            self.seen_alive = True

    async def explain_failure(self) -> None:
        """Raises what a failed element means: PeerGone, TransferTimeout or TransferRefused."""
        self.seen_alive = False
        await greet(self.beacon)
        raise TransferRefused(f"{self.engine_address} lives but refused or dropped the read")


def split_reads(reads: Sequence[ReadOp], max_bytes: int) -> Iterator[ReadOp]:
    """The same bytes in pieces of at most `max_bytes`."""
    for op in reads:
        for start in range(0, op.n_bytes, max_bytes):
            n_bytes = min(max_bytes, op.n_bytes - start)
            yield ReadOp(op.local_address + start, op.remote_address + start, n_bytes)


_engines: weakref.WeakSet[MooncakeTransport] = weakref.WeakSet()


def _immortalise_engines() -> None:
    """In a forked child: one reference too many, so that no engine's destructor runs there."""
    for transport in _engines:
        if transport._engine is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport._engine))


os.register_at_fork(after_in_child=_immortalise_engines)
