"""The blocking client of a Slipstream cluster's gRPC face.

    with Client("127.0.0.1:7000") as client:
        reply = client.chat([{"role": "user", "content": "Hello"}], session="s1")
        print(reply.text, reply.usage)

Errors are those of `libs.common.errors` (InvalidArgument, Overloaded, Unavailable, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from libs.common.dial import CHANNEL_OPTIONS
from libs.common.rpc_errors import from_rpc_error
from libs.common.tls import TlsFiles
from slipstream.replies import Event, Reply, ReplyBuilder
from slipstream.requests import ChatArguments, GenerateArguments, Message, chat_request, prompt_request
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

    def chat(self, messages: Sequence[Message], **arguments: Unpack[ChatArguments]) -> Reply:
        """One whole reply to OpenAI-shaped `messages`."""
        return _drain(self.stream_chat(messages, **arguments))

    def stream_chat(self, messages: Sequence[Message], **arguments: Unpack[ChatArguments]) -> Stream:
        """As `chat`, but streaming."""
        return self._generate(chat_request(messages, arguments), arguments)

    def complete(self, prompt: str, **arguments: Unpack[GenerateArguments]) -> Reply:
        """Continue a plain text, without the chat template."""
        return _drain(self.stream_complete(prompt, **arguments))

    def stream_complete(self, prompt: str, **arguments: Unpack[GenerateArguments]) -> Stream:
        """As `complete`, but streaming."""
        return self._generate(prompt_request(prompt, arguments), arguments)

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

    def _generate(self, request: router_pb2.GenerateRequest, arguments: GenerateArguments) -> Stream:
        metadata = call_metadata(self._api_key, arguments.get("session"), arguments.get("headers", {}))
        timeout_s = arguments.get("timeout_s", self._timeout_s)
        return Stream(self._stub.Generate(request, timeout=timeout_s, metadata=metadata))

    def _unary(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=call_metadata(self._api_key, None, {}))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def _drain(stream: Stream) -> Reply:
    for _ in stream:
        pass
    return stream.reply
