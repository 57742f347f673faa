"""The shares of one tenant in a router's memory: prompts that are held, and messages on their way in."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from libs.common import api_bounds, service_bounds
from services.router.admission.types import BUSY_MESSAGE
from slipstream.errors import Overloaded

_RETRY_AFTER_MS = 1000
_TOKEN_CALLS, _TOKEN_CALL_WAIT_S = 4, 30.0  # of one tenant


class TextShares:
    """The characters of all requests that run or wait, by tenant. Pure."""

    def __init__(
        self,
        *,
        most_chars: int = service_bounds.MAX_HELD_TEXT_CHARS,
        most_tenant_chars: int = service_bounds.MAX_TENANT_HELD_TEXT_CHARS,
    ) -> None:
        self._most_chars = most_chars
        self._most_tenant_chars = most_tenant_chars
        self._held: Counter[str] = Counter()
        self.held_chars = 0

    def acquire(self, tenant: str, chars: int, *, is_job: bool = False) -> None:
        """Hold a request's text. Raises Overloaded beyond the tenant's share or the whole.

        Jobs, which live requests may hold for long, leave the half of both to live requests.
        """
        shares = 2 if is_job else 1
        held, all_held = self._held[tenant] + chars, self.held_chars + chars
        if shares * held > self._most_tenant_chars or shares * all_held > self._most_chars:
            raise Overloaded(BUSY_MESSAGE, retry_after_ms=_RETRY_AFTER_MS)
        self.add(tenant, chars)

    def add(self, tenant: str, chars: int) -> None:
        """Hold them, also beyond the tenant's share: what is done cannot be refused any more."""
        self._held[tenant] += chars
        self.held_chars += chars

    def release(self, tenant: str, chars: int) -> None:
        """Release what `acquire` or `add` held."""
        self._held[tenant] -= chars
        self.held_chars -= chars
        if not self._held[tenant]:
            del self._held[tenant]

    @contextlib.contextmanager
    def holding(self, tenant: str, chars: int, *, is_job: bool = False) -> Iterator[None]:
        """Hold them inside. Raises Overloaded as `acquire` does."""
        self.acquire(tenant, chars, is_job=is_job)
        try:
            yield
        finally:
            self.release(tenant, chars)


def sent_shares() -> TextShares:
    """The bytes that clients are being sent. Each tenant has its share whatever the others hold."""
    most = api_bounds.MAX_TENANT_SENT_RESPONSE_BYTES
    return TextShares(most_chars=sys.maxsize, most_tenant_chars=most)


class TenantSlots:
    """Runs at most `most` pieces of work of one tenant at a time; its others wait in the order they came."""

    def __init__(self, most: int, *, wait_s: float) -> None:
        self._most = most
        self._wait_s = wait_s
        self._tenants: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    def waiting_or_running(self, tenant: str) -> int:
        """The tenant's pieces of work that wait or run."""
        return self._users[tenant]

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Do one piece of the tenant's work inside. Raises Overloaded when no slot is free in time."""
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    async def enter(self, tenant: str) -> None:
        """Begin one piece of the tenant's work, which `leave` ends. Raises as `slot`."""
        of_tenant = self._tenants.setdefault(tenant, asyncio.Semaphore(self._most))
        self._users[tenant] += 1
        try:
            await _acquire(of_tenant, self._wait_s)
        except BaseException:
            self._drop_unused(tenant)
            raise

    def leave(self, tenant: str) -> None:
        """End a piece that `enter` began."""
        self._tenants[tenant].release()
        self._drop_unused(tenant)

    def _drop_unused(self, tenant: str) -> None:
        self._users[tenant] -= 1
        if not self._users[tenant]:
            del self._users[tenant], self._tenants[tenant]


class TokenSlots:
    """Slots of calls that count or detokenize: a list of tokens takes ten times its message's memory."""

    def __init__(self, texts: TextShares) -> None:
        self._texts = texts
        self._slots = TenantSlots(_TOKEN_CALLS, wait_s=_TOKEN_CALL_WAIT_S)

    @contextlib.asynccontextmanager
    async def serving(self, tenant: str, n_bytes: int) -> AsyncIterator[None]:
        """Serve one message of so many bytes inside. Raises Overloaded when there is no room in time."""
        with self._texts.holding(tenant, n_bytes):
            async with self._slots.slot(tenant):
                yield


class ReceiveSlots:
    """Bounds the messages that arrive together. Each may be as large as a message gets; the others wait in
    the flow control of their connections."""

    def __init__(
        self,
        *,
        most: int = service_bounds.MAX_RECEIVED_TOGETHER,
        most_tenant: int = service_bounds.MAX_TENANT_RECEIVED_TOGETHER,
        most_tenant_calls: int = service_bounds.MAX_TENANT_ARRIVING_CALLS,
        wait_s: float = service_bounds.REQUEST_READ_S,
    ) -> None:
        self._all = asyncio.Semaphore(most)
        self._of_tenants = TenantSlots(most_tenant, wait_s=wait_s)
        self._most_tenant_calls = most_tenant_calls
        self._wait_s = wait_s

    @contextlib.asynccontextmanager
    async def receiving(self, tenant: str) -> AsyncIterator[None]:
        """Receive one message of the tenant inside. Raises Overloaded as `enter` does."""
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    async def enter(self, tenant: str) -> None:
        """Begin to receive a message, which `leave` ends. Raises Overloaded when there is no room in time.

        It raises at once when too many of the tenant wait: each takes one of the process's calls.
        """
        if self._of_tenants.waiting_or_running(tenant) >= self._most_tenant_calls:
            raise Overloaded(BUSY_MESSAGE, retry_after_ms=_RETRY_AFTER_MS)
        # First its own: a tenant that waits for itself holds nothing of the others'.
        await self._of_tenants.enter(tenant)
        try:
            await _acquire(self._all, self._wait_s)
        except BaseException:
            self._of_tenants.leave(tenant)
            raise

    def leave(self, tenant: str) -> None:
        """End a message that `enter` began."""
        self._all.release()
        self._of_tenants.leave(tenant)


async def _acquire(room: asyncio.Semaphore, wait_s: float) -> None:
    """Take a place of the room. Raises Overloaded when none is free in time."""
    if not room.locked():  # as for nearly all messages, and a time-out costs more than all else here
        await room.acquire()
        return
    try:
        async with asyncio.timeout(wait_s):
            await room.acquire()
    except TimeoutError:
        raise Overloaded(BUSY_MESSAGE, retry_after_ms=_RETRY_AFTER_MS) from None
