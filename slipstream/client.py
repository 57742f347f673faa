"""The blocking client of a Slipstream cluster's gRPC API.

    with Client("127.0.0.1:7000") as client:
        reply = client.chat([{"role": "user", "content": "Hello"}], session="s1")
        print(reply.text, reply.usage)
        ticket = client.chat(messages, response_format=Ticket)    # a dataclass or a pydantic model
        run = client.run_tools(messages, [get_order_status])      # a function with types and a docstring

Given several routers ("host:port,host:port"), a stream that loses one goes on at the next, with the same
text and nothing doubled. A call that a router refuses for lack of room or a limit is made again after the
pause that the router names. Errors are those of `slipstream.errors` (InvalidArgument, Overloaded, ...).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack, overload

import grpc

from slipstream.batches.calls import BlockingBatches
from slipstream.batches.file_calls import BlockingFiles
from slipstream.calls.callers import Metadata
from slipstream.calls.generation import begin_generation
from slipstream.calls.losses import UnaryTries
from slipstream.calls.refusals import MAX_RETRIES
from slipstream.calls.resume import RESUME_WITHIN_S, Resumption
from slipstream.endpoints import Endpoints
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.jobs.calls import BlockingJobs
from slipstream.metering.usage import UsageRecord, usage_records, usage_request
from slipstream.replies import Event, PromptTokens, Reply, ServedModel, served_models
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
from slipstream.responses.calls import BlockingResponses
from slipstream.rpc.dial import CHANNEL_OPTIONS, tls_options
from slipstream.rpc.tls import TlsFiles
from slipstream.tool_loop import MAX_ROUNDS, ToolLoop, ToolRun
from slipstream.typed.function_tool import ToolError
from slipstream.typed.type_value import KindT
from slipstream.v1 import router_pb2, router_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0
SESSION_HEADER = "x-session-affinity"


def check_tls(tls: TlsFiles | None) -> None:
    """Raises InvalidArgument for files that are missing, are not PEM or do not belong together."""
    try:
        if tls is not None:
            tls.check()
    except OSError as error:
        raise InvalidArgument("tls", f"the files cannot be used: {error}") from None


def call_metadata(api_key: str | None, session: str | None, headers: Mapping[str, str]) -> Metadata:
    """The metadata of a Generate call: authorisation, session affinity, further headers."""
    pairs: dict[str, str | bytes] = dict(headers)
    if api_key and not (api_key.isascii() and api_key.isprintable()):  # such as the line end of a file
        raise InvalidArgument("api_key", "must be printable ASCII characters")
    if api_key:
        pairs["authorization"] = f"Bearer {api_key}"
    if session and session.isascii() and session.isprintable():
        pairs[SESSION_HEADER] = session
    elif session:  # what no text may hold is the router's to refuse
        pairs[f"{SESSION_HEADER}-bin"] = session.encode(errors="surrogatepass")
    return tuple(pairs.items())


class Stream:
    """A reply that is arriving: iterate over its events, then read `reply`. Closing cancels the request.

    A lost router is no end: the stream goes on at the next one, or the same one when it is back.
    """

    def __init__(
        self,
        resumption: Resumption,
        endpoints: Endpoints[grpc.Channel],
        call: Callable[[Any, Resumption], Any],
    ) -> None:
        self._resumption = resumption
        self._endpoints = endpoints
        self._make_call = call
        self._closed = threading.Event()
        self._open()

    @property
    def reply(self) -> Reply:
        """The reply as far as it has arrived; whole after the iteration has ended."""
        return self._resumption.reply

    @property
    def endpoint(self) -> str:
        """The router that answers now."""
        return self._endpoint

    def __iter__(self) -> Iterator[Event]:
        try:
            while True:
                try:
                    for response in self._call:
                        self._endpoints.answered()
                        for item in response.events:
                            event = self._resumption.feed(item)
                            if event is not None:
                                yield event
                    return
                except grpc.RpcError as error:
                    pause_s = self._lost(error)
                self._closed.wait(pause_s)
                self._open()
                if self._closed.is_set():
                    self._call.cancel()
        finally:
            self._call.cancel()

    def close(self) -> None:
        """Cancel the request if it still runs. Idempotent."""
        self._closed.set()
        self._call.cancel()

    def _open(self) -> None:
        self._endpoint, stub = self._endpoints.current(router_pb2_grpc.RouterServiceStub)
        with self._endpoints.calling():
            self._call = self._make_call(stub, self._resumption)

    def _lost(self, error: grpc.RpcError) -> float:
        """How long to pause before it is asked elsewhere; raises when it is not."""
        give_up = self._closed.is_set() or self._endpoints.should_give_up(self._resumption.attempt)
        try:
            pause_s = self._resumption.lost(error, now_s=time.monotonic(), give_up=give_up)
        except Unavailable as final:
            raise self._endpoints.explained(final) from None
        self._endpoints.lost(self._endpoint)
        return pause_s


class Client:
    """Connections to the routers of a cluster. Thread-safe; close it or use it as a context manager."""

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
        """`endpoint`: "host:port" of a router, or of several, comma-separated or as a list: the first is used
        until it is lost. `resume_within_s`: how long a stream that lost its router tries to go on; 0 = it
        fails at once. `max_retries`: how often a call that is refused with Overloaded is made again, after
        the pause that the refusal names. It ends with the call's time-out; a call with `reject_if_busy` is
        not made again."""
        check_tls(tls)
        self._endpoints: Endpoints[grpc.Channel] = Endpoints(endpoint, lambda name: _dial(name, tls))
        self._api_key = api_key
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._resume_within_s = resume_within_s
        self._max_retries = max_retries

    @overload
    def chat(
        self, messages: Sequence[Message], *, response_format: None = None, **arguments: Unpack[ChatArguments]
    ) -> Reply: ...
    @overload
    def chat(
        self, messages: Sequence[Message], *, response_format: type[KindT], **arguments: Unpack[ChatArguments]
    ) -> KindT: ...
    def chat(
        self,
        messages: Sequence[Message],
        *,
        response_format: type[Any] | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> Any:
        """One whole reply to OpenAI-shaped `messages`; with `response_format`, an instance of that type.

        The type is a dataclass, a TypedDict, a pydantic model, or a container of them. Raises AnswerMismatch
        where the answer ended before its form did.
        """
        if response_format is not None and arguments.get("n") not in (None, 1):
            raise InvalidArgument("n", "must be 1 with response_format: Reply.parse reads each choice")
        reply = _drain(self.stream_chat(messages, response_format=response_format, **arguments))
        return reply if response_format is None else reply.parse(response_format)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        response_format: type[Any] | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> Stream:
        """Stream the answer of `chat`; `reply.parse` makes the instance at the end."""
        arguments = with_form(arguments, response_format)
        return self._generate(chat_request(messages, arguments), arguments)

    def run_tools(
        self,
        messages: Sequence[Message],
        functions: Sequence[Callable[..., Any]],
        *,
        max_rounds: int = MAX_ROUNDS,
        response_format: type[Any] | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> ToolRun:
        """Answer `messages`, calling the functions as the model asks for them.

        A function's signature and docstring describe it to the model. After `max_rounds` rounds of calls the
        model has to answer. The model reads the message of a ToolError; other exceptions end the loop.
        """
        loop = ToolLoop(messages, functions, with_form(arguments, response_format), max_rounds)
        while True:
            reply = self.chat(loop.messages, **loop.arguments)
            calls = loop.add_reply(reply)
            for call in calls:
                try:
                    result = loop.start(call)
                except ToolError as error:
                    result = error
                loop.answer(call, result)
            if not calls:
                return ToolRun(reply, loop.messages)

    def complete(self, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]) -> Reply:
        """Continue a plain text, or its token ids, without the chat template."""
        return _drain(self.stream_complete(prompt, **arguments))

    def stream_complete(self, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]) -> Stream:
        """Stream the answer of `complete`."""
        return self._generate(prompt_request(prompt, arguments), arguments)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """End a request by its id; returns when it is released. Unknown ids are fine."""
        request = router_pb2.AbortRequest(request_id=request_id)
        reached, failure = 0, None
        stubs = self._endpoints.all(router_pb2_grpc.RouterServiceStub)
        for stub in stubs:  # any of them may be the one that runs it
            try:
                self._ask(stub, "Abort", request, timeout_s)
                reached += 1
            except Unavailable as error:
                failure = error
        if failure is not None and not reached:
            raise failure

    def models(self, *, timeout_s: float | None = None) -> list[str]:
        """Ids of the models served."""
        return [model.id for model in self.list_models(timeout_s=timeout_s)]

    def list_models(self, *, timeout_s: float | None = None) -> list[ServedModel]:
        """The models served, each with the size of its context and its prices."""
        request = router_pb2.ListModelsRequest()
        return served_models(self._unary("ListModels", request, timeout_s))

    def tokenize(self, prompt: str | Sequence[Message], **arguments: Unpack[ChatArguments]) -> PromptTokens:
        """The tokens of a text, or of messages as `chat` sends them, and the size of the context.

        The context does not bound them. Arguments that change no prompt have no effect.
        """
        request, timeout_s = tokenize_request(prompt, arguments), arguments.get("timeout_s")
        answer = self._unary("Tokenize", request, timeout_s)
        return PromptTokens(answer.token_ids, answer.max_context_tokens)

    def detokenize(self, token_ids: Iterable[int], *, timeout_s: float | None = None) -> str:
        """The text of tokens, with the names of control tokens."""
        return str(self._unary("Detokenize", detokenize_request(token_ids), timeout_s).text)

    @property
    def jobs(self) -> BlockingJobs:
        """Requests that run when the cluster has room."""
        return BlockingJobs(self._endpoints, self._key, self._max_retries)

    @property
    def responses(self) -> BlockingResponses:
        """Answers that are stored."""
        return BlockingResponses(self._endpoints, self._key, self._max_retries)

    @property
    def files(self) -> BlockingFiles:
        """Files of requests, and of the answers of batches."""
        return BlockingFiles(self._endpoints, self._key, self._max_retries)

    @property
    def batches(self) -> BlockingBatches:
        """Batches of the requests in files."""
        return BlockingBatches(self._endpoints, self._key, self._max_retries)

    def usage(
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
        return usage_records(self._unary("GetUsage", request, timeout_s))

    def close(self) -> None:
        """Close the connections; running streams end."""
        for channel in self._endpoints.close():
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _key(self) -> Metadata:
        """The metadata of a call without a session."""
        return call_metadata(self._api_key, None, {})

    def _generate(self, request: router_pb2.GenerateRequest, arguments: GenerateArguments) -> Stream:
        metadata = call_metadata(self._api_key, arguments.get("session"), arguments.get("headers") or {})
        resumption, call = begin_generation(
            request,
            metadata,
            timeout_s=call_timeout_s(arguments, self._timeout_s),
            resume_within_s=self._resume_within_s,
            max_retries=self._max_retries,
        )
        return Stream(resumption, self._endpoints, call)

    def _unary(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Call the router in use, as `_ask` does."""
        _, stub = self._endpoints.current(router_pb2_grpc.RouterServiceStub)
        return self._ask(stub, method, request, timeout_s)

    def _ask(self, stub: Any, method: str, request: Any, timeout_s: float | None) -> Any:
        """Call, and again as `UnaryTries` says. All unary calls are idempotent."""
        call = getattr(stub, method)
        metadata = self._key
        tries = UnaryTries(self._max_retries, timeout_s)
        while True:
            try:
                with self._endpoints.calling():
                    answer = call(request, timeout=tries.left_s(), metadata=metadata)
                self._endpoints.reached()
                return answer
            except grpc.RpcError as error:
                pause_s = tries.pause_s(self._endpoints, error)
            self._endpoints.pause(pause_s)


def _dial(endpoint: str, tls: TlsFiles | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(endpoint, tls.channel_credentials(), options=tls_options(tls))


def _drain(stream: Stream) -> Reply:
    for _ in stream:
        pass
    return stream.reply
