"""Keys that live as long as this process: kept on a lease, and put again after a loss of the lease.

The session holds the keys that should exist. One background task puts the keys and renews the lease. The task
retries for as long as etcd is unreachable. If the lease expired meanwhile, the task grants a new one and puts
all keys again.

    session = LeaseSession(client, ttl_s=10)
    session.set("/slipstream/v1/workers/decode/decode-0", value)
    await session.wait_synced(timeout_s=5)
    ...
    await session.close()                # revokes the lease, which deletes the keys at once
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import ABSENT, EtcdLease, LeaseNotFound, Swap
from libs.common.worker_bounds import REVOKE_S
from slipstream.errors import DeadlineExceeded, SlipstreamError
from slipstream.rpc.backoff import Backoff

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 1.0

MayReplace = Callable[[bytes, bytes], bool]


def replace_always(existing: bytes, mine: bytes) -> bool:
    """The default guard: this session's value replaces that of another lease."""
    return True


class LeaseSession:
    """One lease and the keys on it."""

    def __init__(
        self,
        client: EtcdClient,
        *,
        ttl_s: int,
        may_replace: MayReplace = replace_always,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """The first put of a key replaces the value of another lease: the last process to put is the newest.

        Every later put calls `may_replace(existing, mine)`, and does nothing on False. So a process that lost
        its lease cannot displace its successor.
        """
        self._client = client
        self._ttl_s = ttl_s
        self._may_replace = may_replace
        self._clock = clock
        self._jitter = jitter
        self._wanted: dict[str, bytes] = {}
        self._dirty: set[str] = set()
        self._displaced: set[str] = set()
        self._put: set[str] = set()  # the keys that this session has put at least once
        self._lease: EtcdLease | None = None
        self._term: int | None = None
        self._deadline = 0.0  # when the lease expires without a renewal, on `clock`
        self._wake = asyncio.Event()
        self._synced = asyncio.Event()
        self.leases_lost = 0
        self._task = asyncio.create_task(self._run(), name="etcd-lease-session")

    @property
    def lease_id(self) -> int | None:
        """The current lease; None before the first grant and after a loss."""
        return self._lease.lease_id if self._lease else None

    @property
    def term(self) -> int | None:
        """The current lease while it certainly lives and has all keys of this session; else None.

        A process that was stopped beyond its lease reads None or another number. It no longer owns the work
        that it began under the old number.
        """
        return None if self._displaced or self._clock() >= self._deadline else self._term

    @property
    def displaced_keys(self) -> frozenset[str]:
        """This session's keys that a newer owner holds."""
        return frozenset(self._displaced)

    def set(self, key: str, value: bytes) -> None:
        """Have the background task put the key with this value. Returns at once."""
        self._wanted[key] = value
        self._touch(key)

    async def wait_synced(self, *, timeout_s: float) -> None:
        """Return when etcd has all changes of `set`. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"etcd does not have this process's keys after {timeout_s:g} s") from None

    async def close(self) -> None:
        """Stop renewing and revoke the lease. Without etcd the keys stay until the lease expires."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._lease is not None:
            try:
                async with asyncio.timeout(REVOKE_S):
                    await self._client.revoke_lease(self._lease.lease_id)
            except (SlipstreamError, TimeoutError) as error:
                log.warning("lease was not revoked, it expires by itself: %s", error)
            self._lease = self._term = None

    def _touch(self, key: str) -> None:
        self._dirty.add(key)
        self._synced.clear()
        self._wake.set()

    async def _run(self) -> None:
        backoff = Backoff(longest_s=_LONGEST_PAUSE_S)
        while True:
            try:
                await self._reconcile()
                backoff.succeeded()
                await self._sleep_until_due()
            except LeaseNotFound:
                self._lose_lease()
            except Exception as error:
                # After any error the task retries, because its end would remove a healthy worker.
                log.warning("lease session: %s", error, exc_info=not isinstance(error, SlipstreamError))
                await asyncio.sleep(backoff.pause_s(self._jitter()))

    async def _reconcile(self) -> None:
        """Grant or renew the lease, and write the changed keys."""
        if self._lease is None:
            asked_at = self._clock()
            self._lease = await self._client.grant_lease(self._ttl_s)
            self._deadline = asked_at + self._lease.ttl_s
            self._dirty.update(self._wanted)
        elif self._clock() >= self._renewal_due():
            asked_at = self._clock()
            # Half of the time left, so that a second try on another member can precede the expiry.
            timeout_s = max(0.5, (self._deadline - asked_at) / 2)
            ttl_s = await self._client.renew_lease(self._lease.lease_id, timeout_s=timeout_s)
            self._deadline = asked_at + ttl_s
            self._dirty.update(self._displaced)  # the newer owner may have ended
        while self._dirty:
            key = next(iter(self._dirty))
            value = self._wanted.get(key)
            await self._write(key, value, self._lease.lease_id)
            if self._wanted.get(key) is value:
                self._dirty.discard(key)
        self._term = self._lease.lease_id
        self._synced.set()

    async def _write(self, key: str, value: bytes | None, lease_id: int) -> None:
        """Make etcd hold `value` (None: nothing) under `key`, unless a newer owner does."""
        while True:
            current = await self._client.get(key)
            self._displaced.discard(key)
            if current is not None and current.lease_id != lease_id:
                if value is None:
                    return
                if key in self._put and not self._may_replace(current.value, value):
                    log.warning("%s belongs to a newer owner and is not overwritten", key)
                    self._displaced.add(key)
                    return
            if current is None and value is None:
                return
            expected = current.mod_revision if current else ABSENT
            swap = Swap(key, value, expected, lease_id if value is not None else 0)
            if (await self._client.swap([swap])).succeeded:
                if value is not None:
                    self._put.add(key)
                return

    def _renewal_due(self) -> float:
        assert self._lease is not None
        return self._deadline - self._lease.ttl_s * 2 / 3

    async def _sleep_until_due(self) -> None:
        # wait_for would be wrong here: on Python 3.11 it may swallow the cancellation of `close`.
        try:
            async with asyncio.timeout(max(0.0, self._renewal_due() - self._clock())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _lose_lease(self) -> None:
        log.warning("etcd lease %x was lost; taking a new one", self.lease_id or 0)
        self.leases_lost += 1
        self._lease = self._term = None
        self._synced.clear()
