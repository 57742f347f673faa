"""Calls of one service with the client's key. The next router replaces one that is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from slipstream.calls import losses as limits
from slipstream.calls.call_status import CallStatus
from slipstream.calls.losses import Losses
from slipstream.endpoints import Endpoints

Metadata = tuple[tuple[str, str | bytes], ...]
CALL_S = 60.0


def _always() -> bool:
    return True


class BlockingCaller:
    """The blocking calls of one service. Thread-safe."""

    def __init__(
        self, stub: Callable[[grpc.Channel], Any], endpoints: Endpoints[grpc.Channel], metadata: Metadata
    ) -> None:
        self._stub = stub
        self._endpoints = endpoints
        self._metadata = metadata

    def call(
        self, method: str, request: Any, *, is_idempotent: bool = True, timeout_s: float = CALL_S
    ) -> Any:
        """The answer of a router. `timeout_s`: of each try."""

        def ask(stub: Any) -> Any:
            return getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)

        return self._outlast(ask, Losses(is_idempotent=is_idempotent, within_s=timeout_s))

    def send(self, method: str, messages: Callable[[], Iterator[Any]], *, timeout_s: float) -> Any:
        """The router's answer to a stream of messages. `messages` makes the stream again for each try.

        What ends the wait, such as KeyboardInterrupt, cancels the call.
        """

        def ask(stub: Any) -> Any:
            call = getattr(stub, method).future(messages(), timeout=timeout_s, metadata=self._metadata)
            try:
                return call.result()
            finally:
                call.cancel()

        return self._outlast(ask, Losses(is_idempotent=False))

    def items(self, method: str, request: Any, field: str) -> Iterator[Any]:
        """The items of a list, which come in pages. A page is asked for when the one before is read."""
        while True:
            page = self.call(method, request)
            items = getattr(page, field)
            yield from items
            if not (page.has_more and items):
                return
            request.after = items[-1].id

    def stream(
        self, method: str, request: Any, *, is_whole: Callable[[], bool] = _always
    ) -> Iterator[tuple[int, Any]]:
        """The responses of a stream, each with the number of its try. A loss begins the next try.

        `is_whole`: whether a stream that ended had all; otherwise another try follows. Closing cancels it.
        """
        losses, n_tries = Losses(), 0
        while True:
            name, stub = self._endpoints.current(self._stub)
            with self._endpoints.calling():
                call = getattr(stub, method)(request, metadata=self._metadata)
            try:
                for response in call:
                    losses.answered()
                    self._endpoints.reached()
                    yield n_tries, response
                if is_whole():
                    return
            except grpc.RpcError as error:
                losses.check(self._endpoints, error)
            finally:
                call.cancel()
            self._endpoints.lost(name)
            time.sleep(limits.PAUSE_S)
            n_tries += 1

    def _outlast(self, ask: Callable[[Any], Any], losses: Losses) -> Any:
        while True:
            name, stub = self._endpoints.current(self._stub)
            try:
                with self._endpoints.calling():
                    answer = ask(stub)
                self._endpoints.reached()
                return answer
            except grpc.RpcError as error:
                losses.check(self._endpoints, error)
            self._endpoints.lost(name)
            time.sleep(limits.PAUSE_S)


class AsyncCaller:
    """The same for one event loop."""

    def __init__(
        self,
        stub: Callable[[grpc.aio.Channel], Any],
        endpoints: Endpoints[grpc.aio.Channel],
        metadata: Metadata,
    ) -> None:
        self._stub = stub
        self._endpoints = endpoints
        self._metadata = metadata

    async def call(
        self, method: str, request: Any, *, is_idempotent: bool = True, timeout_s: float = CALL_S
    ) -> Any:
        """As `BlockingCaller.call`."""

        async def ask(stub: Any) -> Any:
            return await getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)

        return await self._outlast(ask, Losses(is_idempotent=is_idempotent, within_s=timeout_s))

    async def send(self, method: str, messages: Callable[[], Iterator[Any]], *, timeout_s: float) -> Any:
        """As `BlockingCaller.send`. A thread makes each message; the task's end cancels the call."""

        async def ask(stub: Any) -> Any:
            call = getattr(stub, method)(timeout=timeout_s, metadata=self._metadata)
            status = CallStatus(call)
            try:
                made = messages()
                while (message := await asyncio.to_thread(next, made, None)) is not None and not call.done():
                    await call.write(message)
                if not call.done():
                    await call.done_writing()
                return await call
            except grpc.aio.AioRpcError as error:
                raise await status.behind(error) from None
            finally:
                call.cancel()

        return await self._outlast(ask, Losses(is_idempotent=False))

    async def items(self, method: str, request: Any, field: str) -> AsyncIterator[Any]:
        """As `BlockingCaller.items`."""
        while True:
            page = await self.call(method, request)
            items = getattr(page, field)
            for item in items:
                yield item
            if not (page.has_more and items):
                return
            request.after = items[-1].id

    async def stream(
        self, method: str, request: Any, *, is_whole: Callable[[], bool] = _always
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """As `BlockingCaller.stream`."""
        losses, n_tries = Losses(), 0
        while True:
            name, stub = self._endpoints.current(self._stub)
            call = getattr(stub, method)(request, metadata=self._metadata)
            try:
                async for response in call:
                    losses.answered()
                    self._endpoints.reached()
                    yield n_tries, response
                if is_whole():
                    return
            except grpc.aio.AioRpcError as error:
                losses.check(self._endpoints, error)
            finally:
                call.cancel()
            self._endpoints.lost(name)
            await asyncio.sleep(limits.PAUSE_S)
            n_tries += 1

    async def _outlast(self, ask: Callable[[Any], Awaitable[Any]], losses: Losses) -> Any:
        while True:
            name, stub = self._endpoints.current(self._stub)
            try:
                answer = await ask(stub)
                self._endpoints.reached()
                return answer
            except grpc.aio.AioRpcError as error:
                losses.check(self._endpoints, error)
            self._endpoints.lost(name)
            await asyncio.sleep(limits.PAUSE_S)
