"""A refusal that reaches an upload amid its writes keeps the server's status."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from slipstream import AsyncClient
from slipstream.errors import NotFound
from slipstream.v1 import batches_pb2_grpc
from tests.support.stubs.partial_servicer import partial_servicer

CONTENT = b"x" * (4 << 20)


class _Refusing(batches_pb2_grpc.BatchServiceServicer):
    async def UploadFile(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            await asyncio.sleep(0.002)  # so that the client writes as the call ends
            await context.abort(grpc.StatusCode.NOT_FOUND, "refused")


async def test_an_upload_that_is_refused_as_it_is_written_has_the_servers_status() -> None:
    """Without CallStatus more than every tenth is Internal: gRPC puts a failed write's status first."""
    server = grpc.aio.server()
    batches_pb2_grpc.add_BatchServiceServicer_to_server(partial_servicer(_Refusing), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = AsyncClient(f"127.0.0.1:{port}")
    try:
        for _ in range(60):
            with pytest.raises(NotFound, match="refused"):
                await client.files.upload(CONTENT)
    finally:
        await client.close()
        await server.stop(0)
