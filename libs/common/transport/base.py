"""The contract of a KV transport, in call order.

1. `register` memory once, at start; peers may read it and own reads may land in it.
2. Send peers `session_id` and addresses, by gRPC. The id belongs to this incarnation of the process:
   a read under the id of a dead incarnation fails, it never reaches its successor's memory.
3. `read` pulls bytes of a peer into own registered memory. It has no effect on the peer.
4. `close`. Nothing is called after it, and nothing in a forked child: both raise TransportClosed.

Errors of `read`, all TransferError (so UNAVAILABLE: the caller falls back or retries elsewhere):

    TransferTimeout    the time-out passed, or the peer made no progress
    PeerGone           the peer is dead, or another incarnation answers under its address
    TransferRefused    an address is not in registered memory, on either side; or quarantined
    TransportClosed    after close, or in a forked child

The destination after a failed, timed-out or cancelled read: its content is undefined, and when `read`
has ended no late byte lands in it, with one exception: a peer that keeps trickling bytes can hold an
engine's transfer open beyond any bound. Then the error says `quiet=False` and the destination is
quarantined: `quarantined` is true and new reads into it are refused until the engine's transfer ends.
The owner must not reuse such memory before that.
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


# Called once for each ReadOp of a read, in any order and in any thread, when all its bytes have landed:
# the place to verify them, while the next ones are on their way. Must be quick and thread-safe.
Landed = Callable[[ReadOp], None]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory: `n_bytes` from `address`, of the host or of a CUDA device ("cuda:N"). Their addresses never
    overlap."""

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
        """Names this incarnation to peers; opaque."""
        ...

    @property
    def reads_in_flight(self) -> int:
        """Reads that have not ended, quarantined ones included: the ledger's `transfers`."""
        ...

    @property
    def quarantined_bytes(self) -> int:
        """Own memory that late bytes of failed reads may still reach."""
        ...

    def register(self, buffer: Buffer | Tensor | Region) -> Region:
        """Make memory readable by peers and a valid destination.

        A writable buffer or a contiguous tensor, of the host or of a CUDA device, is kept alive until
        close; the memory of a bare Region is the caller's to keep alive. Device memory is for reads by an
        engine built with CUDA; its checksums are those of a copy in the host.
        Raises TransferRefused when the transport does not take it, and says why.
        """
        ...

    async def read(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        """Pull all of `reads` from one peer; returns when every byte has landed and `landed` was called for
        every op. An error that `landed` raises fails the read.

        Ends within `timeout_s` plus the time a stalled transfer needs to end (4 s). A cancel stops it under
        the same contract about late bytes. The caller verifies checksums.
        """
        ...

    def quarantined(self, address: int, n_bytes: int) -> bool:
        """Whether late bytes of a failed read may still land in the range."""
        ...

    async def close(self) -> None:
        """Stop serving and reading; ends reads in flight. Idempotent."""
        ...


def _take(region: Region) -> None:
    return


class RegionTable:
    """The registered regions of one transport. Keeps their buffers alive as long as it lives."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._kept_alive: list[object] = []

    def add(self, buffer: Buffer | Tensor | Region, *, take: Callable[[Region], None] = _take) -> Region:
        """Record memory once `take` has taken it. TransferRefused for an empty or read-only one, and what
        `take` raises."""
        region, owner = _region_of(buffer)
        if region.address <= 0 or region.n_bytes <= 0:
            raise TransferRefused(f"cannot register {region.n_bytes} bytes at {region.address:#x}")
        if not is_location(region.location):
            raise TransferRefused(f"cannot register memory of {region.location!r}: only cpu and cuda:N")
        take(region)
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
        """Raises TransportClosed when the transport must not be touched."""
        if self.closed:
            raise TransportClosed(f"the {self._name} transport is closed")
        if os.getpid() != self._pid:
            raise TransportClosed(f"the {self._name} transport belongs to the parent process")


def _region_of(buffer: Buffer | Tensor | Region) -> tuple[Region, object]:
    """The memory, and what keeps it alive."""
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
    """The buffer's memory as a ctypes array, which keeps it alive. TypeError when it is read-only.

    Takes a bytearray, mmap, memoryview, numpy array: anything with the buffer protocol.
    """
    view = memoryview(buffer)
    return (ctypes.c_char * view.nbytes).from_buffer(view)
