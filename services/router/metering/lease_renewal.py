"""Renews the leases of a limiter in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from libs.common.service_bounds import LIMIT_LEASE_S, LIMIT_RENEW_S
from libs.common.telemetry.counters import Counters
from services.router.metering.lease_store import LeaseRequest, LeaseStore
from services.router.metering.limit_window import LimitKind
from services.router.metering.limiter import HeldLease, LeasePlace, Limiter
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)

_GAP_S = 0.02  # between two renewals that requests ask for
_KEPT_S = 60.0  # after its window: the clocks of routers differ
_RENEWS_IN_A_LEASE = 4


class LeaseRenewal:
    """Asks the database for what requests are expected to use. Failures change no lease."""

    def __init__(self, limiter: Limiter, store: LeaseStore, counters: Counters) -> None:
        self._counters = counters
        self._limiter = limiter
        self._store = store
        self._is_failing = False

    @property
    def has_leases(self) -> bool:
        """Whether the router holds a part of a limit."""
        return bool(self._limiter.leases)

    async def run(self) -> None:
        """Renew for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMIT_RENEW_S if self._limiter.leases else None):
                    await self._limiter.low.wait()
            await asyncio.sleep(_GAP_S)
            self._limiter.low.clear()
            await self.renew()
            for kind, share in self._limiter.spend_shares().items():
                self._counters.set("slipstream_spend_limit_used_ratio", share, (kind.value,))

    async def renew(self) -> None:
        """Renew what has changed, and what would expire. Forget windows that are over. Raises nothing."""
        try:
            await self._renew()
        except SlipstreamError as error:
            self._note(error)
        else:
            self._note(None)

    async def _renew(self) -> None:
        """See `renew`. Raises what the database raises."""
        limiter = self._limiter
        now = limiter.wall_clock_s()
        limiter.reduce_unrenewed()
        for place, held in list(limiter.leases.items()):
            if held.window.end_unix_s is not None and held.window.end_unix_s + _KEPT_S < now:
                del limiter.leases[place]
        limiter.follow_routers()
        due = [(place, held) for place, held in limiter.leases.items() if _is_due(place, held, now)]
        if not due:
            return
        asks = [_request(place, held, now) for place, held in due]
        try:
            grants = await self._store.renew(asks, now_unix_s=now)
        except SlipstreamError:
            for _, held in due:
                held.lease.is_changed = True
            raise
        for (place, held), ask, grant in zip(due, asks, grants, strict=True):
            held.lease.renew(
                grant.granted,
                others_granted=grant.others_granted,
                others_used=grant.others_used,
                now_unix_s=now,
            )
            if place[1] is LimitKind.CONCURRENT and not (ask.asked or held.lease.used or held.lease.recent):
                del limiter.leases[place]

    async def close(self) -> None:
        """Give back what is not used. Raises what the database raises."""
        if self.has_leases:
            await self._renew()
            await self._store.close(now_unix_s=self._limiter.wall_clock_s())
            self._limiter.leases.clear()

    def _note(self, error: SlipstreamError | None) -> None:
        if error is not None and not self._is_failing:
            log.error("limits are not shared with other routers: %s", error.message)
        elif error is None and self._is_failing:
            log.info("limits are shared with other routers again")
        self._is_failing = error is not None


def _is_due(place: LeasePlace, held: HeldLease, now_unix_s: float) -> bool:
    if held.window.end_unix_s is not None and held.window.end_unix_s <= now_unix_s:
        return False  # over; requests that still end count in the next window
    if held.lease.is_changed:
        return True
    expires = place[1] is LimitKind.CONCURRENT
    return expires and now_unix_s - held.lease.renewed_unix_s > LIMIT_LEASE_S / _RENEWS_IN_A_LEASE


def _request(place: LeasePlace, held: HeldLease, now_unix_s: float) -> LeaseRequest:
    subject, kind = place
    is_idle = kind is LimitKind.CONCURRENT and not (held.lease.used or held.lease.recent)
    used, asked = held.lease.begin_renewal()
    if is_idle:
        asked = held.lease.granted = 0
    end = held.window.end_unix_s
    return LeaseRequest(
        subject=subject,
        kind=kind.value,
        window_unix_s=held.window.start_unix_s,
        limit=held.lease.limit,
        used=used,
        asked=asked,
        expires_unix_s=now_unix_s + LIMIT_LEASE_S if end is None else end + _KEPT_S,
    )
