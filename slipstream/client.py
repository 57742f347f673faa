"""The blocking client of a Slipstream cluster's gRPC face.

    with Client("127.0.0.1:7000") as client:
        reply = client.chat([{"role": "user", "content": "Hello"}], session="s1")
        print(reply.text, reply.usage)

Errors are those of `libs.common.errors` (InvalidArgument, Overloaded, Unavailable, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from libs.common.dial import CHANNEL_OPTIONS
from libs.common.rpc_errors import from_rpc_error
from libs.common.tls import TlsFiles
from slipstream.replies import Event, Reply, ReplyBuilder
from slipstream.requests import Message, Options, Tool, chat_request, prompt_request
from slipstream.v1 import router_pb2, router_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0
SESSION_HEADER = "x-session-affinity"


def call_metadata(
    api_key: str | None, session: str | None, headers: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """The metadata of a Generate call: authorisation, session affinity, further headers."""
    pairs = dict(headers)
    if api_key:
        pairs["authorization"] = f"Bearer {api_key}"
    if session:
        pairs[SESSION_HEADER] = session
    return tuple(pairs.items())


class Stream:
    """A reply that is arriving: iterate over its events, then read `reply`. Closing cancels the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._builder = ReplyBuilder()

    @property
    def reply(self) -> Reply:
        """What has arrived so far; whole after the iteration has ended."""
        return self._builder.reply

    def __iter__(self) -> Iterator[Event]:
        try:
            for response in self._call:
                event = self._builder.feed(response)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self._call.cancel()

    def close(self) -> None:
        """Cancel the request if it still runs. Idempotent."""
        self._call.cancel()


class Client:
    """A connection to one router. Thread-safe; close it or use it as a context manager."""

    def __init__(
        self,
        endpoint: str = "127.0.0.1:7000",
        *,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if tls is None:
            self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        else:
            credentials = tls.channel_credentials()
            self._channel = grpc.secure_channel(endpoint, credentials, options=CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._api_key = api_key
        self._timeout_s = timeout_s

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Reply:
        """One whole reply to OpenAI-shaped `messages`. `options` are the fields of `Options`."""
        stream = self.stream_chat(
            messages,
            model=model,
            tools=tools,
            tool_choice=tool_choice,
            session=session,
            headers=headers,
            timeout_s=timeout_s,
            **options,
        )
        return _drain(stream)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Stream:
        """As `chat`, but streaming."""
        request = chat_request(
            model, messages, tools=tools, tool_choice=tool_choice, options=Options(**options)
        )
        return self._generate(request, session, headers, timeout_s)

    def complete(
        self,
        prompt: str,
        *,
        model: str = "",
        session: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Reply:
        """Continue a plain text, without the chat template."""
        request = prompt_request(model, prompt, options=Options(**options))
        return _drain(self._generate(request, session, None, timeout_s))

    def abort(self, request_id: str, *, timeout_s: float = 10.0) -> None:
        """End a request by its id; returns when it is released. Unknown ids are fine."""
        self._unary(self._stub.Abort, router_pb2.AbortRequest(request_id=request_id), timeout_s)

    def models(self, *, timeout_s: float = 10.0) -> list[str]:
        """Ids of the models served."""
        response = self._unary(self._stub.ListModels, router_pb2.ListModelsRequest(), timeout_s)
        return [model.id for model in response.models]

    def close(self) -> None:
        """Close the connection; running streams end."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        request: router_pb2.GenerateRequest,
        session: str | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> Stream:
        metadata = call_metadata(self._api_key, session, headers or {})
        return Stream(self._stub.Generate(request, timeout=timeout_s or self._timeout_s, metadata=metadata))

    def _unary(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=call_metadata(self._api_key, None, {}))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def _drain(stream: Stream) -> Reply:
    for _ in stream:
        pass
    return stream.reply
