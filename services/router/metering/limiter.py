"""Limits of keys and tenants at one router: whether a request may run, from leases in memory.

A request never waits for the database. `lease_renewal.py` renews the leases in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from libs.common.service_bounds import LIMIT_LEASE_S, LIMIT_RENEW_S
from libs.common.telemetry.counters import Counters
from services.router.metering.lease import Lease
from services.router.metering.limit_headers import LimitState
from services.router.metering.limit_window import LimitKind, LimitWindow, window_of
from slipstream.errors import QuotaExceeded, RateLimited
from slipstream.metering.money import amount_text
from slipstream.metering.rate_limits import RateLimits

# A limited key or tenant, as the database names it, and its limits.
LimitedSubject: TypeAlias = tuple[str, RateLimits]
LeasePlace: TypeAlias = tuple[str, LimitKind]

_SPEND = (LimitKind.SPEND_DAY, LimitKind.SPEND_MONTH)
_GENERATED = (LimitKind.TOKENS, *_SPEND)
_UNITS: Mapping[LimitKind, str] = {
    LimitKind.REQUESTS: "requests a minute",
    LimitKind.TOKENS: "tokens a minute",
    LimitKind.CONCURRENT: "requests at a time",
    LimitKind.SPEND_DAY: "a day",
    LimitKind.SPEND_MONTH: "a month",
}
_HEADERS = ((LimitKind.REQUESTS, "requests"), (LimitKind.TOKENS, "tokens"))
_CONCURRENT_RETRY_MS = 1000
# A router gives up a lease before others take it, because the clocks of routers differ.
_UNRENEWED_SHARE = 0.75
_COUNT_ROUTERS_S = 1.0


class LimitSource(Protocol):
    """Knows the API keys."""

    def key_name(self, sha256: bytes) -> str:
        """The name of the key with this hash; empty without one."""

    def limits_of(self, tenant: str, sha256: bytes) -> Sequence[LimitedSubject]:
        """The limits of the tenant and of the key; none in most cases."""


@dataclass(slots=True)
class HeldLease:
    """A lease with its window."""

    window: LimitWindow
    lease: Lease


@dataclass(frozen=True, slots=True)
class LimitedUse:
    """Amounts of one request: estimates until it ends. `n_requests` 0: a further choice of a request.

    What runs no model takes no tokens and no spend, whose limits do not refuse it.
    """

    n_requests: int
    prompt_tokens: int
    output_tokens: int
    spend_pico: int
    runs_model: bool = True

    def amount(self, kind: LimitKind) -> int:
        """The amount that counts for a kind of limit."""
        if kind is LimitKind.REQUESTS:
            return self.n_requests
        if kind is LimitKind.TOKENS:
            return self.prompt_tokens + self.output_tokens
        return 1 if kind is LimitKind.CONCURRENT else self.spend_pico


@dataclass(slots=True)
class Reservation:
    """A running request's part of its limits. `end` settles it, once."""

    _limiter: Limiter
    _held: Sequence[tuple[str, LimitKind, int, LimitWindow, int]]
    _is_over: bool = field(default=False)

    def end(self, *, n_requests: int, tokens: int, spend_pico: int) -> None:
        """Replace the estimates by what the request has used, and end its place."""
        if self._is_over:
            return
        self._is_over = True
        actual = {LimitKind.CONCURRENT: 0, LimitKind.REQUESTS: n_requests, LimitKind.TOKENS: tokens}
        for subject, kind, limit, window, reserved in self._held:
            more = actual.get(kind, spend_pico) - reserved
            self._limiter.settle(subject, kind, limit, window, more)


class Limiter:
    """The leases of this router. Used by one event loop."""

    def __init__(
        self,
        source: LimitSource,
        *,
        wall_clock_s: Callable[[], float],
        n_routers: Callable[[], int],
        is_shared: bool,
        counters: Counters,
    ) -> None:
        """`is_shared`: leases come from a database. Else each router has an equal part of a limit."""
        self._source = source
        self.wall_clock_s = wall_clock_s
        self._count_routers = n_routers
        self._n_routers = 1
        self._counted_unix_s = 0.0
        self._is_shared = is_shared
        self._counters = counters
        self.low = asyncio.Event()  # set: a lease should be renewed soon
        self.leases: dict[LeasePlace, HeldLease] = {}

    def admit(self, tenant: str, key_sha256: bytes, use: LimitedUse) -> Reservation | None:
        """Take what a request needs; None where nothing limits it. Raises RateLimited, QuotaExceeded."""
        subjects = self._source.limits_of(tenant, key_sha256)
        if not subjects:
            return None
        places = [
            (subject, kind, limit)
            for subject, limits in subjects
            for kind in LimitKind
            if (limit := getattr(limits, kind)) is not None
        ]
        leases = [self._current(*place) for place in places]
        for (subject, kind, _), held in zip(places, leases, strict=True):
            held.lease.ask(use.amount(kind))
            if use.n_requests and (use.runs_model or kind not in _GENERATED):
                self._check(subject, kind, held, use)
        for (_, kind, _), held in zip(places, leases, strict=True):
            held.lease.use(use.amount(kind))
        if self._is_shared and any([held.lease.is_low for held in leases]):
            self.low.set()
        return Reservation(
            self,
            [
                (subject, kind, limit, held.window, use.amount(kind))
                for (subject, kind, limit), held in zip(places, leases, strict=True)
            ],
        )

    def settle(self, subject: str, kind: LimitKind, limit: int, window: LimitWindow, amount: int) -> None:
        """Use `amount` more or less than was taken in `window`. In a later window only more counts.

        `limit`: as it was then; a lease that is there keeps the limit of now.
        """
        if not amount:
            return
        held = self._held_now(subject, kind) or self._current(subject, kind, limit)
        if held.window == window or amount > 0:
            held.lease.use(amount)

    def states(self, tenant: str, key_sha256: bytes) -> list[LimitState]:
        """The limits of requests and of tokens of which least is left. None without limits."""
        found: list[LimitState] = []
        subjects = self._source.limits_of(tenant, key_sha256)
        if not subjects:
            return found
        for kind, name in _HEADERS:
            held = [
                self._current(subject, kind, limit)
                for subject, limits in subjects
                if (limit := getattr(limits, kind)) is not None
            ]
            if held:
                tightest = min(held, key=lambda each: each.lease.remaining)
                end_unix_s = tightest.window.end_unix_s
                assert end_unix_s is not None  # a minute's
                found.append(LimitState(name, tightest.lease.limit, tightest.lease.remaining, end_unix_s))
        return found

    def reduce_unrenewed(self) -> None:
        """Hold nothing in advance by a lease that was not renewed in time: others may hold it."""
        now = self.wall_clock_s()
        for (_, kind), held in self.leases.items():
            if now - held.lease.renewed_unix_s > _UNRENEWED_SHARE * LIMIT_LEASE_S:
                held.lease.reduce(0 if kind is LimitKind.CONCURRENT else held.lease.used)

    def follow_routers(self) -> None:
        """Share every lease with as many routers as there are now."""
        n_routers = self._routers() if self._is_shared else 1
        for held in self.leases.values():
            if held.lease.n_routers != n_routers:
                held.lease.n_routers = n_routers
                held.lease.is_changed = True

    def spend_shares(self) -> dict[LimitKind, float]:
        """How much of the limit is used, of each kind of spend: that of the subject nearest to its end."""
        now = self.wall_clock_s()
        shares = dict.fromkeys(_SPEND, 0.0)
        for (_, kind), held in self.leases.items():
            if kind in shares and held.lease.limit and _covers(held.window, now):
                used = held.lease.limit - held.lease.remaining
                shares[kind] = max(shares[kind], used / held.lease.limit)
        return shares

    def _routers(self) -> int:
        """How many routers there are, counted once a second."""
        now = self.wall_clock_s()
        if abs(now - self._counted_unix_s) >= _COUNT_ROUTERS_S:
            self._n_routers, self._counted_unix_s = max(1, self._count_routers()), now
        return self._n_routers

    def _current(self, subject: str, kind: LimitKind, limit: int) -> HeldLease:
        """The lease of the window that is now."""
        n_routers = self._routers()
        if not self._is_shared:
            limit, n_routers = max(1, limit // n_routers), 1
        held = self._held_now(subject, kind)
        if held is None:
            now = self.wall_clock_s()
            lease = Lease(limit, n_routers=n_routers, renewed_unix_s=now)
            held = self.leases[subject, kind] = HeldLease(window_of(kind, now), lease)
        elif held.lease.limit != limit:  # the file of keys has changed
            held.lease.limit = limit
            held.lease.is_changed = True
        return held

    def _held_now(self, subject: str, kind: LimitKind) -> HeldLease | None:
        held = self.leases.get((subject, kind))
        return held if held is not None and _covers(held.window, self.wall_clock_s()) else None

    def _check(self, subject: str, kind: LimitKind, held: HeldLease, use: LimitedUse) -> None:
        """Raises the refusal. Tokens and spend are estimates: what is left need not cover them."""
        lease = held.lease
        is_too_long = kind is LimitKind.TOKENS and use.prompt_tokens > lease.limit
        if lease.room >= 1 and not is_too_long:
            return
        self._counters.add("slipstream_limited_total", labels=(kind.value,))
        if lease.is_low and self._is_shared:
            self.low.set()
        limit = amount_text(lease.limit) if kind in _SPEND else str(lease.limit)
        message = f"the limit of {limit} {_UNITS[kind]} for {subject.replace(':', ' ', 1)} is reached"
        if is_too_long:
            message = (
                f"the prompt has about {use.prompt_tokens} tokens, more than the limit of {limit} a minute"
            )
        error = QuotaExceeded if kind in _SPEND else RateLimited
        retry_after_ms = 0 if is_too_long else self._retry_after_ms(kind, held)  # no time helps a long prompt
        raise error(message, retry_after_ms=retry_after_ms)

    def _retry_after_ms(self, kind: LimitKind, held: HeldLease) -> int:
        if self._is_shared and held.lease.remaining > 0 and held.lease.free > 0:
            return int(LIMIT_RENEW_S * 1e3)  # others hold what is left; a renewal gets some
        if kind is LimitKind.CONCURRENT:
            return _CONCURRENT_RETRY_MS
        return max(1, round(self._left_s(held.window) * 1e3))

    def _left_s(self, window: LimitWindow) -> float:
        assert window.end_unix_s is not None
        return max(0.0, window.end_unix_s - self.wall_clock_s())


def _covers(window: LimitWindow, now_unix_s: float) -> bool:
    return window.end_unix_s is None or window.start_unix_s <= now_unix_s < window.end_unix_s
