"""A small asyncio client of etcd's v3 API over grpc.aio, for discovery and placements.

The client reads keys and prefixes, puts, compares and swaps, and holds leases; watch.py adds an endless
prefix watch. Every call has a time-out and fails with a typed error: `EtcdUnavailable`, `EtcdRefused`,
`LeaseNotFound`, `EtcdCompacted` or `Unauthenticated`.

The client repeats reads within their time-out, and sends changes once. After `EtcdUnavailable` a change may
have happened, and compare-and-swap makes a repeat safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import grpc

from libs.common.etcd.channel import EtcdTls, channel_target, open_channel
from libs.common.etcd.connection import Connection, Connections
from libs.common.etcd.messages import (
    NO_LEASE,
    EtcdCompacted,
    EtcdLease,
    EtcdRefused,
    EtcdUnavailable,
    KeyValue,
    LeaseNotFound,
    PrefixSnapshot,
    Swap,
    SwapOutcome,
)
from slipstream.errors import SlipstreamError, Unauthenticated
from slipstream.etcd.v3 import etcd_pb2 as pb
from slipstream.rpc.names import wait_resolved

_READ_ATTEMPT_S = 1.0
_PIECE_KEYS = 1024  # of a prefix that are read in one call, and one iteration of the event loop
# etcd's default --max-txn-ops is 128.
MAX_SWAPS = 64


class _Serializable(Protocol):
    def SerializeToString(self) -> bytes: ...


_Request = TypeVar("_Request", bound=_Serializable)
_Response = TypeVar("_Response")
_Metadata = tuple[tuple[str, str], ...]


def prefix_end(prefix: str) -> bytes:
    """The first key after all keys that start with `prefix`: the exclusive end of its range."""
    end = bytearray(prefix.encode())
    while end:
        if end[-1] < 0xFF:
            end[-1] += 1
            return bytes(end)
        end.pop()
    return b"\0"


class EtcdClient:
    """One channel to an etcd cluster. Create it inside the event loop; `close` it in the end."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: EtcdTls | None = None,
        user: str | None = None,
        password: Callable[[], str] = str,
        timeout_s: float = 3.0,
    ) -> None:
        """`password` is called at each login, with `user`."""
        self._connections = Connections(_EtcdChannels(endpoints, tls), linger_s=timeout_s + 1)
        self._naming = asyncio.create_task(self._follow_name(endpoints[0]), name="etcd-name")
        self._timeout_s = timeout_s
        self._user = user
        self._password = password
        self._token: str | None = None
        self._token_lock = asyncio.Lock()

    async def close(self) -> None:
        """Close the channel; open watches end with `EtcdUnavailable`."""
        self._naming.cancel()
        await asyncio.gather(self._naming, return_exceptions=True)
        await self._connections.close()

    @property
    def failed_s(self) -> float:
        """When etcd last left a call without an answer, on the event loop's clock; -inf: never."""
        return self._connections.failed_s

    async def _follow_name(self, endpoint: str) -> None:
        """Replace the channel when a name that did not resolve does: gRPC may ask two minutes later."""
        if await wait_resolved(endpoint, what="etcd"):
            self._connections.dial_again()

    async def get(self, key: str) -> KeyValue | None:
        """The key's current value, or None."""
        request = pb.RangeRequest(key=key.encode())
        response = await self._read("KV/Range", request, pb.RangeResponse)
        return _key_value(response.kvs[0]) if response.kvs else None

    async def get_prefix(self, prefix: str) -> PrefixSnapshot:
        """All keys that start with `prefix`, as of one revision. Raises EtcdCompacted when that is gone.

        There may be 100,000s: in one answer they would exceed its time, and what a channel receives.
        """
        begin, end, revision = prefix.encode(), prefix_end(prefix), 0
        entries: dict[str, KeyValue] = {}
        while True:
            request = pb.RangeRequest(key=begin, range_end=end, limit=_PIECE_KEYS, revision=revision)
            response = await self._read("KV/Range", request, pb.RangeResponse)
            revision = revision or response.header.revision
            for kv in response.kvs:
                entry = _key_value(kv)
                entries[entry.key] = entry
            if not response.more:
                return PrefixSnapshot(revision, entries)
            begin = response.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, *, lease_id: int = NO_LEASE) -> int:
        """Set the key unconditionally; returns its mod_revision.

        Raises `LeaseNotFound` for an ended lease.
        """
        request = pb.PutRequest(key=key.encode(), value=value, lease=lease_id)
        return (await self._call("KV/Put", request, pb.PutResponse)).header.revision

    async def delete(self, key: str) -> bool:
        """Delete the key; False if there was none."""
        request = pb.DeleteRangeRequest(key=key.encode())
        return (await self._call("KV/DeleteRange", request, pb.DeleteRangeResponse)).deleted > 0

    async def swap(self, swaps: Sequence[Swap]) -> SwapOutcome:
        """Make all swaps, or none if any key changed since. At most `MAX_SWAPS`, each of another key."""
        if not 1 <= len(swaps) <= MAX_SWAPS:
            raise ValueError(f"{len(swaps)} swaps in one transaction, must be 1 to {MAX_SWAPS}")
        request = pb.TxnRequest(
            compare=[
                pb.Compare(
                    result=pb.COMPARE_RESULT_EQUAL,
                    target=pb.COMPARE_TARGET_MOD,
                    key=swap.key.encode(),
                    mod_revision=swap.expected_revision,
                )
                for swap in swaps
            ],
            success=[_swap_op(swap) for swap in swaps],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=swap.key.encode())) for swap in swaps],
        )
        response = await self._call("KV/Txn", request, pb.TxnResponse)
        if response.succeeded:
            return SwapOutcome(True, response.header.revision)
        ranges = [op.response_range.kvs for op in response.responses]
        return SwapOutcome(
            False, response.header.revision, tuple(_key_value(kvs[0]) if kvs else None for kvs in ranges)
        )

    async def grant_lease(self, ttl_s: int) -> EtcdLease:
        """Grant a new lease. etcd may lengthen a very short TTL."""
        response = await self._call(
            "Lease/LeaseGrant", pb.LeaseGrantRequest(ttl=ttl_s), pb.LeaseGrantResponse
        )
        return EtcdLease(response.id, response.ttl)

    async def renew_lease(self, lease_id: int, *, timeout_s: float | None = None) -> int:
        """Restart the lease's time to live; returns it in seconds. Raises `LeaseNotFound` if it expired.

        Each renewal uses one short stream. A long stream saves nothing at a renewal every few seconds, and
        grpc.aio raises untyped errors for a write after its end.
        """
        for fresh_token in (False, True):
            connection = self._connections.current
            method: grpc.aio.StreamStreamMultiCallable[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]
            method = connection.channel.stream_stream(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=pb.LeaseKeepAliveResponse.FromString,
            )
            limit_s = timeout_s or self._timeout_s
            call = method(
                iter([pb.LeaseKeepAliveRequest(id=lease_id)]),
                timeout=limit_s,
                metadata=await self.metadata(fresh_token=fresh_token),
                wait_for_ready=True,
            )
            try:
                response = await connection.answer_of(call.read(), timeout_s=limit_s)
                if not isinstance(response, pb.LeaseKeepAliveResponse):
                    raise EtcdUnavailable("etcd ended the renewal without an answer")
                if response.ttl <= 0:
                    raise LeaseNotFound(f"etcd lease {lease_id:x} has ended")
                return response.ttl
            except grpc.aio.AioRpcError as error:
                if fresh_token or not self._is_stale_token(error):
                    raise typed_error(error) from error
            finally:
                call.cancel()
        raise AssertionError("unreachable")

    async def revoke_lease(self, lease_id: int) -> None:
        """End the lease now, which deletes its keys. Does nothing if it has already ended."""
        try:
            request = pb.LeaseRevokeRequest(id=lease_id)
            await self._call("Lease/LeaseRevoke", request, pb.LeaseRevokeResponse)
        except LeaseNotFound:
            pass

    def open_watch(
        self, requests: AsyncIterator[pb.WatchRequest], metadata: _Metadata
    ) -> tuple[Connection, grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]]:
        """Open a bare Watch stream for watch.py. Returns it with its connection; the caller cancels it."""
        connection = self._connections.current
        method: grpc.aio.StreamStreamMultiCallable[pb.WatchRequest, pb.WatchResponse]
        method = connection.channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )
        # hasleader: a member cut off from its cluster ends the stream instead of staying silent.
        call = method(requests, metadata=(("hasleader", "true"), *metadata), wait_for_ready=True)
        return connection, call

    async def metadata(self, *, fresh_token: bool = False) -> _Metadata:
        """The call metadata with the token; logs in when needed. Empty without a user."""
        if self._user is None:
            return ()
        stale = self._token
        async with self._token_lock:
            # Another call may have renewed the token while this one waited for the lock.
            if self._token is None or (fresh_token and self._token == stale):
                request = pb.AuthenticateRequest(name=self._user, password=self._password())
                connection = self._connections.current
                login = _unary(connection.channel, "Auth/Authenticate", pb.AuthenticateResponse)
                try:
                    asked = login(request, timeout=self._timeout_s, wait_for_ready=True)
                    response = await connection.answer_of(asked, timeout_s=self._timeout_s)
                except grpc.aio.AioRpcError as error:
                    raise typed_error(error) from error
                self._token = response.token
            return (("token", self._token),)

    async def _read(self, method: str, request: _Request, response_type: type[_Response]) -> _Response:
        """Read in short attempts until the time-out, so that one dead member costs little."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                attempt_s = min(left, _READ_ATTEMPT_S)
                return await self._call(method, request, response_type, timeout_s=attempt_s, is_read=True)
            except EtcdUnavailable:
                if left <= _READ_ATTEMPT_S:
                    raise
                await asyncio.sleep(0.05)

    async def _call(
        self,
        method: str,
        request: _Request,
        response_type: type[_Response],
        *,
        timeout_s: float | None = None,
        is_read: bool = False,
    ) -> _Response:
        """Make a unary call. A read may be repeated, so it fails as soon as its connection is replaced."""
        for fresh_token in (False, True):
            metadata = await self.metadata(fresh_token=fresh_token)
            connection = self._connections.current
            call = _unary(connection.channel, method, response_type)
            try:
                limit_s = timeout_s or self._timeout_s
                pending = call(request, timeout=limit_s, metadata=metadata, wait_for_ready=True)
                wait = connection.answer_of if is_read else connection.outcome_of
                return await wait(pending, timeout_s=limit_s)
            except grpc.aio.AioRpcError as error:
                if fresh_token or not self._is_stale_token(error):
                    raise typed_error(error) from error
        raise AssertionError("unreachable")

    def _is_stale_token(self, error: grpc.aio.AioRpcError) -> bool:
        return self._user is not None and "invalid auth token" in (error.details() or "")


def _unary(
    channel: grpc.aio.Channel, method: str, response_type: type[_Response]
) -> grpc.aio.UnaryUnaryMultiCallable[_Serializable, _Response]:
    return channel.unary_unary(
        f"/etcdserverpb.{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=response_type.FromString,  # type: ignore[attr-defined]
    )


class _EtcdChannels:
    """The `ChannelSource` of a client."""

    def __init__(self, endpoints: Sequence[str], tls: EtcdTls | None) -> None:
        self._target = channel_target(endpoints)
        self._host = endpoints[0].rpartition(":")[0]
        self._tls = tls

    def open(self) -> grpc.aio.Channel:
        return open_channel(self._target, self._tls, host=self._host)

    def probe(self, channel: grpc.aio.Channel, timeout_s: float) -> Awaitable[object]:
        """Read a key from the member's own store. An authentication error shows that it works, too."""
        request = pb.RangeRequest(key=b"\0", serializable=True)
        return _unary(channel, "KV/Range", pb.RangeResponse)(request, timeout=timeout_s, wait_for_ready=True)

    def credentials_version(self) -> object:
        return None if self._tls is None else self._tls.version()


def typed_error(error: grpc.aio.AioRpcError) -> SlipstreamError:
    """The typed error of a failed call to etcd."""
    code, details = error.code(), f"etcd: {error.details()}"
    codes = grpc.StatusCode
    if code is codes.NOT_FOUND and "lease" in details:
        return LeaseNotFound(details)
    if code is codes.OUT_OF_RANGE:
        return EtcdCompacted(details)
    if code is codes.UNAUTHENTICATED or "authentication" in details:
        return Unauthenticated(details)
    if code in (codes.INVALID_ARGUMENT, codes.PERMISSION_DENIED, codes.FAILED_PRECONDITION):
        return EtcdRefused(details)
    if code is codes.RESOURCE_EXHAUSTED and "space" in details:
        return EtcdRefused(details)
    return EtcdUnavailable(f"{details} ({code.name})")


def key_text(key: bytes) -> str:
    """A key as text. Other programs may write keys that are no UTF-8; their readers ignore them."""
    return key.decode(errors="replace")


def _key_value(kv: pb.KeyValue) -> KeyValue:
    return KeyValue(key_text(kv.key), kv.value, kv.mod_revision, kv.lease)


def _swap_op(swap: Swap) -> pb.RequestOp:
    key = swap.key.encode()
    if swap.value is None:
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=swap.value, lease=swap.lease_id))
