"""Calls of one service with the client's key. The next router replaces one that is lost or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Generic

import grpc

from slipstream.calls import losses as limits
from slipstream.calls.call_status import CallStatus
from slipstream.calls.losses import CALL_S, Losses
from slipstream.endpoints import ChannelT, Endpoints

Metadata = tuple[tuple[str, str | bytes], ...]


def _always() -> bool:
    return True


class _ServiceCaller(Generic[ChannelT]):
    def __init__(
        self,
        stub: Callable[[ChannelT], Any],
        endpoints: Endpoints[ChannelT],
        metadata: Metadata,
        max_retries: int,
    ) -> None:
        """`max_retries`: how often a call that routers refuse is made again."""
        self._stub = stub
        self._endpoints = endpoints
        self._metadata = metadata
        self._max_retries = max_retries


class BlockingCaller(_ServiceCaller[grpc.Channel]):
    """The blocking calls of one service. Thread-safe."""

    def call(
        self, method: str, request: Any, *, is_idempotent: bool = True, timeout_s: float = CALL_S
    ) -> Any:
        """The answer of a router. `timeout_s`: of each try; refused ones and their pauses share one."""

        def ask(stub: Any, left_s: float) -> Any:
            return getattr(stub, method)(request, timeout=left_s, metadata=self._metadata)

        losses = Losses(self._max_retries, is_idempotent=is_idempotent, timeout_s=timeout_s)
        return self._outlast(ask, losses)

    def send(self, method: str, messages: Callable[[], Iterator[Any]], *, timeout_s: float) -> Any:
        """The router's answer to a stream of messages. `messages` makes the stream again for each try.

        What ends the wait, such as KeyboardInterrupt, cancels the call.
        """

        def ask(stub: Any, left_s: float) -> Any:
            call = getattr(stub, method).future(messages(), timeout=left_s, metadata=self._metadata)
            try:
                return call.result()
            finally:
                call.cancel()

        losses = Losses(self._max_retries, is_idempotent=False, timeout_s=timeout_s)
        return self._outlast(ask, losses)

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
        """The responses of a stream, each with the number of its try. A loss or refusal begins the next one.

        `is_whole`: whether a stream that ended had all; otherwise another try follows. Closing cancels it.
        """
        losses, n_tries = Losses(self._max_retries), 0
        while True:
            pause_s = limits.PAUSE_S
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
                pause_s = losses.pause_s(self._endpoints, error)
            finally:
                call.cancel()
            self._endpoints.lost(name)
            self._endpoints.pause(pause_s)
            n_tries += 1

    def _outlast(self, ask: Callable[[Any, float], Any], losses: Losses) -> Any:
        while True:
            name, stub = self._endpoints.current(self._stub)
            try:
                with self._endpoints.calling():
                    answer = ask(stub, losses.left_s())
                self._endpoints.reached()
                return answer
            except grpc.RpcError as error:
                pause_s = losses.pause_s(self._endpoints, error)
            self._endpoints.lost(name)
            self._endpoints.pause(pause_s)


class AsyncCaller(_ServiceCaller[grpc.aio.Channel]):
    """`BlockingCaller` for one event loop."""

    async def call(
        self, method: str, request: Any, *, is_idempotent: bool = True, timeout_s: float = CALL_S
    ) -> Any:
        """See `BlockingCaller.call`."""

        async def ask(stub: Any, left_s: float) -> Any:
            return await getattr(stub, method)(request, timeout=left_s, metadata=self._metadata)

        losses = Losses(self._max_retries, is_idempotent=is_idempotent, timeout_s=timeout_s)
        return await self._outlast(ask, losses)

    async def send(self, method: str, messages: Callable[[], Iterator[Any]], *, timeout_s: float) -> Any:
        """See `BlockingCaller.send`. A thread makes each message; the task's end cancels the call."""

        async def ask(stub: Any, left_s: float) -> Any:
            call = getattr(stub, method)(timeout=left_s, metadata=self._metadata)
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

        losses = Losses(self._max_retries, is_idempotent=False, timeout_s=timeout_s)
        return await self._outlast(ask, losses)

    async def items(self, method: str, request: Any, field: str) -> AsyncIterator[Any]:
        """See `BlockingCaller.items`."""
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
        """See `BlockingCaller.stream`."""
        losses, n_tries = Losses(self._max_retries), 0
        while True:
            pause_s = limits.PAUSE_S
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
                pause_s = losses.pause_s(self._endpoints, error)
            finally:
                call.cancel()
            self._endpoints.lost(name)
            await asyncio.sleep(pause_s)
            n_tries += 1

    async def _outlast(self, ask: Callable[[Any, float], Awaitable[Any]], losses: Losses) -> Any:
        while True:
            name, stub = self._endpoints.current(self._stub)
            try:
                answer = await ask(stub, losses.left_s())
                self._endpoints.reached()
                return answer
            except grpc.aio.AioRpcError as error:
                pause_s = losses.pause_s(self._endpoints, error)
            self._endpoints.lost(name)
            await asyncio.sleep(pause_s)
