"""Meters requests: prices each, holds it to the limits of its key and tenant, and counts its usage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Protocol

from libs.common.telemetry.counters import Counters
from services.router.admission.tenant_shares import TenantSlots
from services.router.admission.types import AdmissionRequest
from services.router.metering.limit_headers import anthropic_headers, openai_headers
from services.router.metering.limiter import LimitedUse, Limiter, LimitSource, Reservation
from services.router.metering.price_list import PriceList, TokenPrice, find_price
from services.router.metering.usage_ledger import UsageLedger
from services.router.metering.usage_query import UsageQuery
from services.router.metering.usage_store import UsageCounts, UsageKey, UsageSum
from services.router.request.types import Caller
from slipstream import errors
from slipstream.metering.money import amount_number
from slipstream.v1 import router_pb2

_QUESTION_WAIT_S = 10.0  # of one about usage, for those that its tenant asked before
# Errors that a client causes: what the answer has until then is charged. Other failures cost nothing.
_CHARGED = (errors.Aborted, errors.DeadlineExceeded, errors.Unauthenticated)


class BackgroundTasks(Protocol):
    """The tasks that renew leases and write usage."""

    async def close(self) -> None:
        """Write what there is, and end."""


@dataclass(slots=True)
class MeteredRequest:
    """One answer. `counts_prompt` False: another choice of a request, whose first choice pays the prompt.

    `usage`: of the answer so far, once it has a token.
    """

    price: TokenPrice | None
    counts_prompt: bool
    _end: Callable[[MeteredRequest, BaseException | None], None]
    _is_over: bool = field(default=False)
    usage: router_pb2.Usage | None = None

    def cost_pico(self, usage: router_pb2.Usage) -> int:
        """The cost of the answer."""
        if self.price is None:
            return 0
        return self.price.cost_pico(
            prompt_tokens=usage.prompt_tokens if self.counts_prompt else 0,
            cached_tokens=usage.cached_tokens if self.counts_prompt else 0,
            completion_tokens=usage.completion_tokens,
        )

    def state_cost(self, usage: router_pb2.Usage) -> None:
        """Write the cost into the usage that the client gets."""
        if self.price is not None:
            usage.cost.currency = self.price.currency
            usage.cost.amount_pico = self.cost_pico(usage)

    def end(self, error: BaseException | None) -> None:
        """Count the usage, if it is charged, and give back what was reserved. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._end(self, error)


class Metering:
    """The meter of one router. `ledger` None: usage is not kept. Used by one event loop."""

    def __init__(
        self,
        source: LimitSource,
        *,
        names: Sequence[str],
        limiter: Limiter,
        ledger: UsageLedger | None,
        counters: Counters,
        wall_clock_s: Callable[[], float],
        tasks: BackgroundTasks,
    ) -> None:
        """`names`: of the model, and its aliases."""
        self._source = source
        self._names = names
        self._limiter = limiter
        self._ledger = ledger
        self._counters = counters
        self._wall_clock_s = wall_clock_s
        self._tasks = tasks
        self.price: TokenPrice | None = None
        self._questions = TenantSlots(1, wait_s=_QUESTION_WAIT_S)

    def set_prices(self, prices: PriceList) -> None:
        """Let these prices count for requests that begin from now on. Raises ValueError."""
        self.price = find_price(prices, self._names)

    def begin(self, caller: Caller, ask: AdmissionRequest, *, counts_prompt: bool = True) -> MeteredRequest:
        """Take what a request needs of its limits. Raises RateLimited, QuotaExceeded."""
        price = self.price
        prompt_tokens = ask.context_tokens if counts_prompt else 0
        spend_pico = 0
        if price is not None:
            spend_pico = prompt_tokens * price.input_pico + ask.output_tokens * price.output_pico
        use = LimitedUse(int(counts_prompt), prompt_tokens, ask.output_tokens, spend_pico)
        reservation = self._limiter.admit(caller.tenant, caller.key_sha256, use)

        def end(request: MeteredRequest, error: BaseException | None) -> None:
            self._count(request, caller, reservation, error)

        return MeteredRequest(price, counts_prompt, end)

    @contextlib.contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        """A call that runs no model: it counts as a request, whatever comes of it. Raises as `begin`."""
        held = self._limiter.admit(caller.tenant, caller.key_sha256, LimitedUse(1, 0, 0, 0, runs_model=False))
        try:
            yield
        finally:
            if held is not None:
                held.end(n_requests=1, tokens=0, spend_pico=0)

    @property
    def today(self) -> date:
        """The day of UTC."""
        return datetime.fromtimestamp(self._wall_clock_s(), UTC).date()

    async def usage(self, query: UsageQuery, encode: Callable[[Sequence[UsageSum]], bytes]) -> bytes:
        """The usage, with what this router counted until now, as `encode` writes it in a thread.

        It may have 10,000 rows, so a tenant asks one thing at a time. Raises FailedPrecondition, Overloaded.
        """
        if self._ledger is None:
            raise errors.FailedPrecondition("usage is kept by routers with --database; this one has none")
        async with self._questions.slot(query.tenant or ""):
            return await asyncio.to_thread(encode, await self._ledger.read(query))

    async def close(self) -> None:
        """Write the usage, and give leases back. Called after the last request."""
        await self._tasks.close()

    def limit_headers(self, tenant: str, key_sha256: bytes, *, is_anthropic: bool = False) -> dict[str, str]:
        """The headers of an answer that state limits, by the names of OpenAI's clients or of Anthropic's."""
        states = self._limiter.states(tenant, key_sha256)
        return anthropic_headers(states) if is_anthropic else openai_headers(states, self._wall_clock_s())

    def _count(
        self,
        request: MeteredRequest,
        caller: Caller,
        reservation: Reservation | None,
        error: BaseException | None,
    ) -> None:
        usage = request.usage if error is None or isinstance(error, _CHARGED) else None
        counts = UsageCounts()
        if usage is not None:
            counts = UsageCounts(
                requests=int(request.counts_prompt),
                prompt_tokens=usage.prompt_tokens if request.counts_prompt else 0,
                cached_tokens=usage.cached_tokens if request.counts_prompt else 0,
                completion_tokens=usage.completion_tokens,
                cost_pico=request.cost_pico(usage),
            )
        if reservation is not None:
            tokens = counts.prompt_tokens + counts.completion_tokens
            # A request that was refused for lack of capacity does not count.
            n_requests = int(request.counts_prompt and not isinstance(error, errors.Overloaded))
            reservation.end(n_requests=n_requests, tokens=tokens, spend_pico=counts.cost_pico)
        if usage is None:
            return
        currency = "" if request.price is None else request.price.currency
        if currency:
            cost = amount_number(counts.cost_pico)
            self._counters.add("slipstream_cost_total", cost, labels=(self._names[0], currency))
        if self._ledger is not None:
            key_name = self._source.key_name(caller.key_sha256)
            day = self.today.isoformat()
            key = UsageKey(caller.tenant, key_name, self._names[0], caller.endpoint, day, currency)
            self._ledger.add(key, counts)


def price_of(metering: Metering | None) -> TokenPrice | None:
    """The price of the model that is served; None without prices."""
    return None if metering is None else metering.price


def limited_call(metering: Metering | None, caller: Caller) -> contextlib.AbstractContextManager[None]:
    """See `Metering.call`. Without limits a call takes nothing."""
    return contextlib.nullcontext() if metering is None else metering.call(caller)
