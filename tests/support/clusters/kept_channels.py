"""Channels to the workers of a cluster that a test keeps between its calls of GetStatus."""

from __future__ import annotations

import threading

import grpc

from slipstream.rpc.peer_token import TokenMinter
from slipstream.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 60.0
# A new channel would share the pauses between attempts to connect of the one that it replaces.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class KeptChannels:
    """One channel a worker. Tests poll workers many times: a new channel costs more than its call.

    Any thread calls it. Close it at the end.
    """

    def __init__(self, tokens: TokenMinter) -> None:
        self._tokens = tokens
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()

    def status(self, endpoint: str) -> worker_pb2.GetStatusResponse:
        """GetStatus of the worker. Raises grpc.RpcError when it does not answer on a new channel."""
        channel, is_new = self._channel(endpoint)
        try:
            return self._ask(channel, endpoint)
        except grpc.RpcError as error:
            self._drop(endpoint, channel)
            if is_new or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        # The kept channel led to a process that has ended.
        channel, _ = self._channel(endpoint)
        try:
            return self._ask(channel, endpoint)
        except grpc.RpcError:
            self._drop(endpoint, channel)
            raise

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _channel(self, endpoint: str) -> tuple[grpc.Channel, bool]:
        """The channel to the worker, and whether it is new."""
        with self._lock:
            channel = self._channels.get(endpoint)
            if channel is not None:
                return channel, False
            channel = self._channels[endpoint] = grpc.insecure_channel(endpoint, options=_OPTIONS)
            return channel, True

    def _ask(self, channel: grpc.Channel, endpoint: str) -> worker_pb2.GetStatusResponse:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        token = self._tokens.tokens_for(endpoint).metadata()
        return stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_TIMEOUT_S, metadata=token)

    def _drop(self, endpoint: str, channel: grpc.Channel) -> None:
        """Forget the channel. Its pauses between attempts to connect would outlast the worker's start.

        It closes with the last call of another thread that still uses it."""
        with self._lock:
            if self._channels.get(endpoint) is channel:
                del self._channels[endpoint]
