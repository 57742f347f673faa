"""The asyncio client: `Client` of slipstream/client.py, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from libs.common.dial import dial
from libs.common.rpc_errors import from_rpc_error
from libs.common.tls import TlsFiles
from slipstream.client import DEFAULT_TIMEOUT_S, call_metadata
from slipstream.replies import Event, Reply, ReplyBuilder
from slipstream.requests import ChatArguments, GenerateArguments, Message, chat_request, prompt_request
from slipstream.v1 import router_pb2, router_pb2_grpc


class AsyncStream:
    """A reply that is arriving: `async for` its events, then read `reply`. Closing it cancels the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._builder = ReplyBuilder()

    @property
    def reply(self) -> Reply:
        """What has arrived so far; whole after the iteration has ended."""
        return self._builder.reply

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for response in self._call:
                event = self._builder.feed(response)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self._call.cancel()

    def close(self) -> None:
        """Cancel the request if it still runs. Idempotent."""
        self._call.cancel()


class AsyncClient:
    """A connection to one router for one event loop; close it or use it as an async context manager."""

    def __init__(
        self,
        endpoint: str = "127.0.0.1:7000",
        *,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._channel = dial(endpoint, tls=tls)
        self._stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._api_key = api_key
        self._timeout_s = timeout_s

    async def chat(self, messages: Sequence[Message], **arguments: Unpack[ChatArguments]) -> Reply:
        """One whole reply to OpenAI-shaped `messages`."""
        return await _drain(self.stream_chat(messages, **arguments))

    def stream_chat(self, messages: Sequence[Message], **arguments: Unpack[ChatArguments]) -> AsyncStream:
        """As `chat`, but streaming."""
        return self._generate(chat_request(messages, arguments), arguments)

    async def complete(self, prompt: str, **arguments: Unpack[GenerateArguments]) -> Reply:
        """Continue a plain text, without the chat template."""
        return await _drain(self.stream_complete(prompt, **arguments))

    def stream_complete(self, prompt: str, **arguments: Unpack[GenerateArguments]) -> AsyncStream:
        """As `complete`, but streaming."""
        return self._generate(prompt_request(prompt, arguments), arguments)

    async def abort(self, request_id: str, *, timeout_s: float = 10.0) -> None:
        """End a request by its id; returns when it is released. Unknown ids are fine."""
        await self._unary(self._stub.Abort, router_pb2.AbortRequest(request_id=request_id), timeout_s)

    async def models(self, *, timeout_s: float = 10.0) -> list[str]:
        """Ids of the models served."""
        response = await self._unary(self._stub.ListModels, router_pb2.ListModelsRequest(), timeout_s)
        return [model.id for model in response.models]

    async def close(self) -> None:
        """Close the connection; running streams end."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _generate(self, request: router_pb2.GenerateRequest, arguments: GenerateArguments) -> AsyncStream:
        metadata = call_metadata(self._api_key, arguments.get("session"), arguments.get("headers", {}))
        timeout_s = arguments.get("timeout_s", self._timeout_s)
        return AsyncStream(self._stub.Generate(request, timeout=timeout_s, metadata=metadata))

    async def _unary(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s, metadata=call_metadata(self._api_key, None, {}))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


async def _drain(stream: AsyncStream) -> Reply:
    async for _ in stream:
        pass
    return stream.reply
