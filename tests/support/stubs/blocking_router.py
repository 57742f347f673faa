"""A blocking gRPC server with the router's contract."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from slipstream.v1 import router_pb2_grpc


@contextmanager
def serving(
    servicer: router_pb2_grpc.RouterServiceServicer, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """The host:port of a server on loopback; with credentials it speaks TLS only."""
    server = grpc.server(ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)
