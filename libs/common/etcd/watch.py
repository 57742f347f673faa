"""An endless watch of a prefix that loses no change.

    async with aclosing(watch_prefix(client, "/slipstream/v1/workers/")) as updates:
        async for update in updates:            # PrefixSnapshot first, then PrefixChanges
            entries = fold(entries, update)

Faults, and what the reader gets:

    etcd restarts, connection cut or silent   the watch reopens after the last seen revision; the reader gets
                                              the changes since, each once and in order
    these changes were compacted              a new PrefixSnapshot; keys that it lacks were deleted
    etcd lost its data                        a new PrefixSnapshot
    etcd stays unavailable                    nothing until etcd is available again
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

import grpc

from libs.common.etcd.client import EtcdClient, key_text, prefix_end, typed_error
from libs.common.etcd.messages import (
    EtcdCompacted,
    EtcdUnavailable,
    KeyValue,
    PrefixChanges,
    PrefixUpdate,
)
from slipstream.errors import SlipstreamError
from slipstream.etcd.v3 import etcd_pb2 as pb
from slipstream.rpc.backoff import Backoff

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.5
# The time-out for opening a stream, because a stopped member never answers. With the longest pause after it,
# it stays below HEAL_S.
_OPEN_TIMEOUT_S: Final = 3.0


async def watch_prefix(
    client: EtcdClient, prefix: str, *, jitter: Callable[[], float] = random.random
) -> AsyncGenerator[PrefixUpdate, None]:
    """Yield a snapshot of the keys that start with `prefix`, then every change, until closed or cancelled.

    The watch logs each outage of etcd once and never raises its errors. `jitter` returns 0 to 1 and spreads
    the reconnects of many watchers.
    """
    revision: int | None = None  # the last revision that was yielded; None: a snapshot is due
    backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
    has_failed = False
    while True:
        try:
            if revision is None:
                snapshot = await client.get_prefix(prefix)
                revision = snapshot.revision
                yield snapshot
            fragments: list[tuple[str, KeyValue | None]] = []
            async for message in _messages(client, prefix, revision + 1):
                if has_failed:
                    log.info("the watch of %s continues after revision %d", prefix, revision)
                has_failed = False
                backoff.succeeded()
                if message.header.revision < revision and message.created:
                    # The member may only lag behind; the pause prevents a tight loop.
                    log.warning("etcd went back to revision %d; taking a snapshot", message.header.revision)
                    revision = None
                    await asyncio.sleep(_FIRST_PAUSE_S)
                    break
                if message.events:
                    fragments += [_change(event) for event in message.events]
                    if message.fragment:  # its last revision may go on in the next one
                        continue
                    revision, changes = message.events[-1].kv.mod_revision, tuple(fragments)
                    fragments.clear()
                    yield PrefixChanges(revision, changes)
                elif not message.created:
                    revision = max(revision, message.header.revision)  # a progress notification
            else:
                raise EtcdUnavailable("etcd ended the watch")
        except EtcdCompacted:
            log.info("the watch of %s: revision %s was compacted; taking a snapshot", prefix, revision)
            revision = None
        except (SlipstreamError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            if not has_failed:
                log.warning("the watch of %s failed: %s", prefix, error)
            has_failed = True
            await asyncio.sleep(backoff.pause_s(jitter()))


async def _messages(client: EtcdClient, prefix: str, start_revision: int) -> AsyncIterator[pb.WatchResponse]:
    """Yield the messages of one Watch stream until it ends. Raises a typed error when it breaks."""
    create = pb.WatchCreateRequest(
        key=prefix.encode(),
        range_end=prefix_end(prefix),
        start_revision=start_revision,
        progress_notify=True,
        fragment=True,  # after an outage one response has up to 1,000 revisions, however long
    )

    over = asyncio.Event()

    async def requests() -> AsyncIterator[pb.WatchRequest]:
        yield pb.WatchRequest(create_request=create)
        # etcd ends a watch when its request stream ends. gRPC does not close that of a broken call by itself.
        await over.wait()

    # Each attempt gets a new token, because an expired one would fail every attempt.
    connection, call = client.open_watch(requests(), await client.metadata(fresh_token=True))
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            message = await connection.answer_of(call.read())
        while isinstance(message, pb.WatchResponse):
            if message.compact_revision:
                raise EtcdCompacted(f"etcd: compacted up to revision {message.compact_revision}")
            if message.canceled:
                raise EtcdUnavailable(f"etcd cancelled the watch: {message.cancel_reason}")
            yield message
            message = await connection.answer_of(call.read())
    except grpc.aio.AioRpcError as error:
        raise typed_error(error) from error
    except TimeoutError:
        raise EtcdUnavailable(f"etcd did not accept a watch within {_OPEN_TIMEOUT_S:g} s") from None
    finally:
        over.set()
        call.cancel()


def _change(event: pb.Event) -> tuple[str, KeyValue | None]:
    key = key_text(event.kv.key)
    if event.type == pb.EVENT_TYPE_DELETE:
        return key, None
    return key, KeyValue(key, event.kv.value, event.kv.mod_revision, event.kv.lease)
