"""Leading blocks of a prompt from the kvstore into reserved pages, before anything is computed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

import grpc

from libs.common.block_hash import pack_hashes
from libs.common.errors import SlipstreamError, TransferError
from libs.common.fingerprint import Fingerprint
from libs.common.rpc_errors import from_rpc_error
from libs.worker.peers import Peers
from libs.worker.pull import BlockPuller, PullStats, RemoteBlock
from libs.worker.tenant_tag import tenant_tag
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

log = logging.getLogger(__name__)

PIN_TIMEOUT_S = 2.0
# Renewed while reading; a grant whose answer is lost holds memory of the store for this long.
LEASE_MS = 15_000
_RENEWALS_A_LEASE = 3
# Who restores the next prefix asks for its pin first: the release of this one can wait so long.
_RELEASE_AFTER_S = 0.002
_RELEASE_TIMEOUT_S = 2.0
BACK_OFF_S = 1.0
# Of the time that computing the blocks would take. The aim is 1.2 times that with a disk that hangs.
DISK_WAIT_PART = 0.15
MIN_DISK_WAIT_MS = 10
FIRST_DISK_WAIT_MS = 100  # before this worker has computed anything


class PrefixRestorer:
    """Pins, reads, verifies, releases. A kvstore that is gone, slow or wrong is a miss, never an error;
    one that failed is left alone for a moment, so that not every request pays its time-out."""

    def __init__(
        self,
        puller: BlockPuller,
        peers: Peers,
        *,
        transport_kind: str,
        instance: str,
        fingerprint: Fingerprint,
        lease_ms: int = LEASE_MS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._puller = puller
        self._peers = peers
        self._transport_kind = transport_kind
        self._instance = instance
        self._fingerprint = fingerprint
        self._lease_ms = lease_ms
        self._clock = clock
        self._silent_until: dict[str, float] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.pins = 0

    async def restore(
        self,
        endpoint: str,
        hashes: Sequence[bytes],
        pages: Sequence[int],
        *,
        first_block: int,
        stats: PullStats,
        salt: bytes = b"",
        recompute_ms: float = 0.0,
    ) -> list[common_pb2.CacheTier.ValueType]:
        """Fill pages[first_block : first_block + n] with verified blocks; returns the n blocks' tiers.

        `hashes`: the chain from block 0 on, no longer than what is wanted. `endpoint` may be empty.
        `recompute_ms`: what computing all of them would take, 0 when that is not known.
        """
        if not endpoint or first_block >= len(hashes):
            return []
        if self._clock() < self._silent_until.get(endpoint, 0.0):
            return []
        stub = kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint))
        request = kvstore_pb2.PinRequest(
            fingerprint=self._fingerprint.to_proto(),
            block_hashes=pack_hashes(hashes),
            first_block=first_block,
            max_blocks=len(hashes) - first_block,
            lease_ms=self._lease_ms,
            owner=self._instance,
            tenant=tenant_tag(salt),
            disk_wait_ms=disk_wait_ms(recompute_ms),
        )
        self.pins += 1
        pinning = stub.Pin(request, timeout=PIN_TIMEOUT_S)
        try:
            # A cancel here ends the call, and the store then keeps nothing of it.
            pinned = await pinning
            keeping = asyncio.create_task(_keep_pinned(stub, pinned))
            try:
                return await self._read(endpoint, pinned, pages[first_block : len(hashes)], stats)
            finally:
                keeping.cancel()
        except grpc.aio.AioRpcError as error:
            log.warning("kvstore %s does not answer: %s", endpoint, from_rpc_error(error))
            self._silent_until[endpoint] = self._clock() + BACK_OFF_S
            return []
        finally:
            # In the background, also after a cancel: nobody waits for it, and the lease ends it anyway.
            self._keep(self._release(stub, pinning))

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def prefetch(self, endpoint: str, hashes: Sequence[bytes]) -> None:
        """Have the kvstore bring what its disks hold of the chain into memory; nobody waits for it."""
        if not endpoint or not hashes or self._clock() < self._silent_until.get(endpoint, 0.0):
            return
        stub = kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint))
        request = kvstore_pb2.LookupRequest(
            fingerprint=self._fingerprint.to_proto(), block_hashes=pack_hashes(hashes)
        )
        self._keep(_ask(stub, request))

    async def _read(
        self, endpoint: str, pinned: kvstore_pb2.PinResponse, pages: Sequence[int], stats: PullStats
    ) -> list[common_pb2.CacheTier.ValueType]:
        blocks = pinned.blocks[: len(pages)]
        if blocks and pinned.transport != self._transport_kind:
            log.warning("kvstore speaks %s, this worker %s", pinned.transport, self._transport_kind)
            return []
        usable = 0
        for block in blocks:
            if block.n_bytes != self._puller.page_bytes:
                log.warning(
                    "kvstore holds a block of %d bytes, not %d", block.n_bytes, self._puller.page_bytes
                )
                break
            usable += 1
        remote = [
            RemoteBlock(page, block.address, block.checksum)
            for page, block in zip(pages, blocks[:usable], strict=False)
        ]
        before = stats.n_blocks
        try:
            await self._puller.pull(pinned.transport_session, remote, stats)
        except SlipstreamError as error:
            log.warning("blocks of the kvstore are not used: %s", error)
            if isinstance(error, TransferError):
                self._silent_until[endpoint] = self._clock() + BACK_OFF_S
        return [block.tier for block in blocks[: stats.n_blocks - before]]

    async def _release(
        self,
        stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub,
        pinning: grpc.aio.UnaryUnaryCall[kvstore_pb2.PinRequest, kvstore_pb2.PinResponse],
    ) -> None:
        try:
            if pinning.cancelled():
                return
            lease_id = (await pinning).lease_id
            if lease_id:
                await asyncio.sleep(_RELEASE_AFTER_S)
                request = kvstore_pb2.ReleasePinRequest(lease_id=lease_id)
                await stub.ReleasePin(request, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("a pin is left to its lease: %s", error.code())
        finally:
            self.pins -= 1


def disk_wait_ms(recompute_ms: float) -> int:
    """How long to wait for a disk before computing instead: with a disk that gives nothing, the time to
    the first token is at most that part longer than without a store."""
    if recompute_ms <= 0:
        return FIRST_DISK_WAIT_MS
    return max(MIN_DISK_WAIT_MS, int(DISK_WAIT_PART * recompute_ms))


async def _ask(stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub, request: kvstore_pb2.LookupRequest) -> None:
    try:
        await stub.Lookup(request, timeout=PIN_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.info("nothing is prefetched: %s", error.code())


async def _keep_pinned(
    stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub, pinned: kvstore_pb2.PinResponse
) -> None:
    """Renew the pin until cancelled. When it has ended all the same, its blocks may be others' by now:
    then their checksums tell, and the read ends where they do not match."""
    if not pinned.lease_id:
        return
    interval_s = pinned.lease_ms / 1000 / _RENEWALS_A_LEASE
    request = kvstore_pb2.RenewPinRequest(lease_id=pinned.lease_id, lease_ms=pinned.lease_ms)
    while True:
        await asyncio.sleep(interval_s)
        try:
            await stub.RenewPin(request, timeout=interval_s)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                log.warning("a pin ended while its blocks were being read")
                return
