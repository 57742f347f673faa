"""The contract of a KV transport, in call order.

1. `register` memory once, at start. Peers may read it, and this process's reads may write to it. Any process
   that reaches a Mooncake engine's port may also write to it, without a credential. `add_destination` admits
   memory that only this process's reads write to.
2. Send peers `session_id` and addresses, by gRPC. The id belongs to this incarnation of the process:
   a read under the id of a dead incarnation fails, it never reaches its successor's memory.
3. `read` pulls bytes of a peer into registered memory or a destination. It has no effect on the peer.
4. `close`. All calls after it, and all calls in a forked child, raise TransportClosed.

Errors of `read`, all TransferError (so UNAVAILABLE: the caller falls back or retries elsewhere):

    TransferTimeout    the time-out passed, or the peer made no progress
    PeerGone           the peer is dead, or another incarnation answers under its address
    TransferRefused    an address is not in registered memory, on either side; or quarantined
    TransportClosed    after close, or in a forked child

After a failed, timed-out or cancelled read the content of its destination is undefined. When `read` has
ended, no late byte lands there, with one exception. A peer that keeps sending a few bytes can keep an
engine's transfer open without bound. Then the error has `quiet=False` and the destination is quarantined:
`quarantined` is true, and new reads into it are refused until the engine's transfer ends. The owner must not
reuse such memory before that.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from libs.common.transport.tensor_memory import HOST, Tensor, is_location, is_tensor, tensor_extent
from slipstream.errors import TransferError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TransferTimeout(TransferError):
    """The read did not finish in time. `quiet` is False while late bytes may still land."""

    def __init__(self, message: str, *, quiet: bool = True) -> None:
        super().__init__(message)
        self.quiet = quiet


class PeerGone(TransferError):
    """The peer's process is dead, or a new incarnation answers under its address."""


class TransferRefused(TransferError):
    """An address outside registered memory, on either side, or a quarantined destination."""


class TransportClosed(TransferError):
    """The transport is closed, or belongs to the parent of this forked process."""


@dataclass(frozen=True, slots=True)
class ReadOp:
    """Copy `n_bytes` at `remote_address` of the peer to `local_address` here."""

    local_address: int
    remote_address: int
    n_bytes: int


# Called once for each ReadOp of a read, in any order and in any thread, when all its bytes have landed. It
# can verify them while further bytes arrive. It must be quick and thread-safe.
Landed = Callable[[ReadOp], None]


@dataclass(frozen=True, slots=True)
class Region:
    """`n_bytes` of memory from `address`, of the host or of a CUDA device ("cuda:N").

    Addresses of the host and of devices never overlap.
    """

    address: int
    n_bytes: int
    location: str = HOST

    def contains(self, address: int, n_bytes: int) -> bool:
        """Whether the whole range lies inside."""
        return self.address <= address and address + n_bytes <= self.address + self.n_bytes

    def overlaps(self, address: int, n_bytes: int) -> bool:
        """Whether the range shares a byte with the region."""
        return address < self.address + self.n_bytes and self.address < address + n_bytes


class KvTransport(Protocol):
    """Reads of peers' registered memory. Used from one event loop; see the module's text."""

    @property
    def kind(self) -> str:
        """mooncake, mooncake-rdma or socket. Peers must be of the same kind."""
        ...

    @property
    def session_id(self) -> str:
        """The opaque id of this incarnation, for peers."""
        ...

    @property
    def reads_in_flight(self) -> int:
        """Reads that have not ended, quarantined ones included: the ledger's `transfers`."""
        ...

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of this process's memory that late bytes of failed reads may still overwrite."""
        ...

    def register(self, buffer: Buffer | Tensor | Region) -> Region:
        """Make memory readable by peers and a valid destination.

        The transport keeps a writable buffer or contiguous tensor alive until `close`. The caller keeps the
        memory of a bare Region alive. Only an engine built with CUDA reads device memory; its checksums are
        those of a copy in the host. Raises TransferRefused with the reason.
        """
        ...

    def add_destination(self, buffer: Buffer | Tensor | Region) -> Region:
        """Make memory a valid destination of reads, which no peer can read or write.

        Keeps the memory alive like `register`. Raises TransferRefused where the engine reads into registered
        memory only: over RDMA, and into device memory.
        """
        ...

    async def read(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        """Pull all of `reads` from one peer, and call `landed` for every op.

        An error that `landed` raises fails the read. The read ends within `timeout_s` plus the time that a
        stalled transfer needs to end (4 s). The contract about late bytes also holds after a cancel. The
        caller verifies checksums.
        """
        ...

    def quarantined(self, address: int, n_bytes: int) -> bool:
        """Whether late bytes of a failed read may still land in the range."""
        ...

    async def close(self) -> None:
        """Stop serving and reading; ends reads in flight. Idempotent."""
        ...


def _accept_any(region: Region) -> None:
    return


class RegionTable:
    """The registered regions of one transport. It keeps their buffers alive."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._kept_alive: list[object] = []

    def add(
        self, buffer: Buffer | Tensor | Region, *, accept: Callable[[Region], None] = _accept_any
    ) -> Region:
        """Record memory that `accept` accepts. Raises TransferRefused for empty or read-only memory, and the
        errors of `accept`."""
        region, owner = _region_of(buffer)
        if region.address <= 0 or region.n_bytes <= 0:
            raise TransferRefused(f"cannot register {region.n_bytes} bytes at {region.address:#x}")
        if not is_location(region.location):
            raise TransferRefused(f"cannot register memory of {region.location!r}: only cpu and cuda:N")
        accept(region)
        self._kept_alive.append(owner)
        self._regions.append(region)
        return region

    def contains(self, address: int, n_bytes: int) -> bool:
        """Whether the range lies inside one registered region."""
        return n_bytes > 0 and any(region.contains(address, n_bytes) for region in self._regions)


class ProcessGuard:
    """Refuses use after close and in a forked child."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self.closed = False

    def check(self) -> None:
        """Raises TransportClosed when the transport must not be used."""
        if self.closed:
            raise TransportClosed(f"the {self._name} transport is closed")
        if os.getpid() != self._pid:
            raise TransportClosed(f"the {self._name} transport belongs to the parent process")


def _region_of(buffer: Buffer | Tensor | Region) -> tuple[Region, object]:
    """The memory, and the object that keeps it alive."""
    if isinstance(buffer, Region):
        return buffer, None
    try:
        if is_tensor(buffer):
            return Region(*tensor_extent(buffer)), buffer
        exported = writable_bytes(buffer)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TransferRefused(f"cannot register this buffer: {error}") from error
    return Region(ctypes.addressof(exported), len(exported)), exported


def writable_bytes(buffer: Buffer) -> ctypes.Array[ctypes.c_char]:
    """The memory of an object with the buffer protocol as a ctypes array, which keeps it alive.

    Raises TypeError when it is read-only.
    """
    view = memoryview(buffer)
    return (ctypes.c_char * view.nbytes).from_buffer(view)
