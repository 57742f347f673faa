"""The asyncio client: `Client` of slipstream/client.py, awaited."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Unpack, overload

import grpc

from slipstream.batches.calls import AsyncBatches
from slipstream.batches.file_calls import AsyncFiles
from slipstream.calls.callers import Metadata
from slipstream.calls.generation import begin_generation
from slipstream.calls.losses import UnaryTries
from slipstream.calls.refusals import MAX_RETRIES
from slipstream.calls.resume import RESUME_WITHIN_S, Resumption
from slipstream.client import DEFAULT_TIMEOUT_S, call_metadata, check_tls
from slipstream.endpoints import Endpoints
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.jobs.calls import AsyncJobs
from slipstream.metering.usage import UsageRecord, usage_records, usage_request
from slipstream.replies import Event, PromptTokens, Reply, ServedModel, ToolCall, served_models
from slipstream.requests import (
    ChatArguments,
    GenerateArguments,
    Message,
    call_timeout_s,
    chat_request,
    detokenize_request,
    prompt_request,
    tokenize_request,
    with_form,
)
from slipstream.responses.calls import AsyncResponses
from slipstream.rpc.dial import dial
from slipstream.rpc.tls import TlsFiles
from slipstream.tool_loop import MAX_ROUNDS, ToolLoop, ToolRun
from slipstream.typed.function_tool import ToolError
from slipstream.typed.type_value import KindT
from slipstream.v1 import router_pb2, router_pb2_grpc


class AsyncStream:
    """A reply that is arriving: `async for` its events, then read `reply`. Closing it cancels the request."""

    def __init__(
        self,
        resumption: Resumption,
        endpoints: Endpoints[grpc.aio.Channel],
        call: Callable[[Any, Resumption], Any],
    ) -> None:
        self._resumption = resumption
        self._endpoints = endpoints
        self._make_call = call
        self._closed = False
        self._open()

    @property
    def reply(self) -> Reply:
        """The reply as far as it has arrived; whole after the iteration has ended."""
        return self._resumption.reply

    @property
    def endpoint(self) -> str:
        """The router that answers now."""
        return self._endpoint

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while True:
                try:
                    async for response in self._call:
                        self._endpoints.answered()
                        for item in response.events:
                            event = self._resumption.feed(item)
                            if event is not None:
                                yield event
                    return
                except grpc.aio.AioRpcError as error:
                    pause_s = self._lost(error)
                await asyncio.sleep(pause_s)
                self._open()
                if self._closed:
                    self._call.cancel()
        finally:
            self._call.cancel()

    def close(self) -> None:
        """Cancel the request if it still runs. Idempotent."""
        self._closed = True
        self._call.cancel()

    def _open(self) -> None:
        self._endpoint, stub = self._endpoints.current(router_pb2_grpc.RouterServiceStub)
        self._call = self._make_call(stub, self._resumption)

    def _lost(self, error: grpc.aio.AioRpcError) -> float:
        """How long to pause before it is asked elsewhere; raises when it is not."""
        give_up = self._closed or self._endpoints.should_give_up(self._resumption.attempt)
        try:
            pause_s = self._resumption.lost(error, now_s=time.monotonic(), give_up=give_up)
        except Unavailable as final:
            raise self._endpoints.explained(final) from None
        self._endpoints.lost(self._endpoint)
        return pause_s


class AsyncClient:
    """Connections to the routers of a cluster, for one event loop; close it or use it with `async with`."""

    def __init__(
        self,
        endpoint: str | Sequence[str] = "127.0.0.1:7000",
        *,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        resume_within_s: float = RESUME_WITHIN_S,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        """See `Client`."""
        check_tls(tls)
        self._endpoints: Endpoints[grpc.aio.Channel] = Endpoints(endpoint, lambda name: dial(name, tls=tls))
        self._api_key = api_key
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._resume_within_s = resume_within_s
        self._max_retries = max_retries

    @overload
    async def chat(
        self, messages: Sequence[Message], *, response_format: None = None, **arguments: Unpack[ChatArguments]
    ) -> Reply: ...
    @overload
    async def chat(
        self, messages: Sequence[Message], *, response_format: type[KindT], **arguments: Unpack[ChatArguments]
    ) -> KindT: ...
    async def chat(
        self,
        messages: Sequence[Message],
        *,
        response_format: type[Any] | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> Any:
        """One whole reply to OpenAI-shaped `messages`; with `response_format`, an instance of that type."""
        if response_format is not None and arguments.get("n") not in (None, 1):
            raise InvalidArgument("n", "must be 1 with response_format: Reply.parse reads each choice")
        reply = await _drain(self.stream_chat(messages, response_format=response_format, **arguments))
        return reply if response_format is None else reply.parse(response_format)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        response_format: type[Any] | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> AsyncStream:
        """Stream the answer of `chat`; `reply.parse` makes the instance at the end."""
        arguments = with_form(arguments, response_format)
        return self._generate(chat_request(messages, arguments), arguments)

    async def run_tools(
        self,
        messages: Sequence[Message],
        functions: Sequence[Callable[..., Any]],
        *,
        max_rounds: int = MAX_ROUNDS,
        response_format: type[Any] | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> ToolRun:
        """See `Client.run_tools`. Coroutine functions are taken too; the calls of one reply run together."""
        loop = ToolLoop(messages, functions, with_form(arguments, response_format), max_rounds)
        while True:
            reply = await self.chat(loop.messages, **loop.arguments)
            calls = loop.add_reply(reply)
            results = await asyncio.gather(*(_result(loop, call) for call in calls))
            for call, result in zip(calls, results, strict=True):
                loop.answer(call, result)
            if not calls:
                return ToolRun(reply, loop.messages)

    async def complete(self, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]) -> Reply:
        """Continue a plain text, or its token ids, without the chat template."""
        return await _drain(self.stream_complete(prompt, **arguments))

    def stream_complete(
        self, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]
    ) -> AsyncStream:
        """Stream the answer of `complete`."""
        return self._generate(prompt_request(prompt, arguments), arguments)

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """End a request by its id; returns when it is released. Unknown ids are fine."""
        request = router_pb2.AbortRequest(request_id=request_id)
        stubs = self._endpoints.all(router_pb2_grpc.RouterServiceStub)
        calls = (self._ask(stub, "Abort", request, timeout_s) for stub in stubs)
        results = await asyncio.gather(*calls, return_exceptions=True)  # any may be the one that runs it
        failures = [result for result in results if isinstance(result, BaseException)]
        serious = [failure for failure in failures if not isinstance(failure, Unavailable)]
        if serious or len(failures) == len(results):
            raise (serious or failures)[0]

    async def models(self, *, timeout_s: float | None = None) -> list[str]:
        """Ids of the models served."""
        return [model.id for model in await self.list_models(timeout_s=timeout_s)]

    async def list_models(self, *, timeout_s: float | None = None) -> list[ServedModel]:
        """The models served, each with the size of its context and its prices."""
        request = router_pb2.ListModelsRequest()
        return served_models(await self._unary("ListModels", request, timeout_s))

    async def tokenize(
        self, prompt: str | Sequence[Message], **arguments: Unpack[ChatArguments]
    ) -> PromptTokens:
        """See `Client.tokenize`."""
        request, timeout_s = tokenize_request(prompt, arguments), arguments.get("timeout_s")
        answer = await self._unary("Tokenize", request, timeout_s)
        return PromptTokens(answer.token_ids, answer.max_context_tokens)

    async def detokenize(self, token_ids: Iterable[int], *, timeout_s: float | None = None) -> str:
        """The text of tokens, with the names of control tokens."""
        return str((await self._unary("Detokenize", detokenize_request(token_ids), timeout_s)).text)

    @property
    def jobs(self) -> AsyncJobs:
        """Requests that run when the cluster has room."""
        return AsyncJobs(self._endpoints, self._key, self._max_retries)

    @property
    def responses(self) -> AsyncResponses:
        """Answers that are stored."""
        return AsyncResponses(self._endpoints, self._key, self._max_retries)

    @property
    def files(self) -> AsyncFiles:
        """Files of requests, and of the answers of batches."""
        return AsyncFiles(self._endpoints, self._key, self._max_retries)

    @property
    def batches(self) -> AsyncBatches:
        """Batches of the requests in files."""
        return AsyncBatches(self._endpoints, self._key, self._max_retries)

    async def usage(
        self,
        *,
        from_day: str = "",
        to_day: str = "",
        group_by: Sequence[str] = (),
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> list[UsageRecord]:
        """The usage of the key's tenant, grouped by day, tenant, key, model or endpoint."""
        request = usage_request(from_day=from_day, to_day=to_day, group_by=group_by, tenant=tenant)
        return usage_records(await self._unary("GetUsage", request, timeout_s))

    async def close(self) -> None:
        """Close the connection; running streams end."""
        for channel in self._endpoints.close():
            await channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _stub(self) -> router_pb2_grpc.RouterServiceAsyncStub:
        """The stub of the router in use."""
        _, stub = self._endpoints.current(router_pb2_grpc.RouterServiceStub)
        found: router_pb2_grpc.RouterServiceAsyncStub = stub
        return found

    @property
    def _key(self) -> Metadata:
        """The metadata of a call without a session."""
        return call_metadata(self._api_key, None, {})

    def _generate(self, request: router_pb2.GenerateRequest, arguments: GenerateArguments) -> AsyncStream:
        metadata = call_metadata(self._api_key, arguments.get("session"), arguments.get("headers") or {})
        resumption, call = begin_generation(
            request,
            metadata,
            timeout_s=call_timeout_s(arguments, self._timeout_s),
            resume_within_s=self._resume_within_s,
            max_retries=self._max_retries,
        )
        return AsyncStream(resumption, self._endpoints, call)

    async def _unary(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """See `Client._unary`."""
        _, stub = self._endpoints.current(router_pb2_grpc.RouterServiceStub)
        return await self._ask(stub, method, request, timeout_s)

    async def _ask(self, stub: Any, method: str, request: Any, timeout_s: float | None) -> Any:
        """See `Client._ask`."""
        call = getattr(stub, method)
        metadata = self._key
        tries = UnaryTries(self._max_retries, timeout_s)
        while True:
            self._endpoints.check_open()
            try:
                answer = await call(request, timeout=tries.left_s(), metadata=metadata)
                self._endpoints.reached()
                return answer
            except grpc.aio.AioRpcError as error:
                pause_s = tries.pause_s(self._endpoints, error)
            await asyncio.sleep(pause_s)


async def _result(loop: ToolLoop, call: ToolCall) -> Any:
    """The answer of the function, or its ToolError."""
    try:
        made = loop.start(call)
        return await made if inspect.isawaitable(made) else made
    except ToolError as error:
        return error


async def _drain(stream: AsyncStream) -> Reply:
    async for _ in stream:
        pass
    return stream.reply
