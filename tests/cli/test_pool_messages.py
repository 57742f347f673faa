"""Messages of the command line about the pool of the kvstore nodes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from slipstream.cli.kv.change import drop_blocks
from slipstream.cli.kv.nodes import Nodes
from slipstream.rpc.dial import PLAIN_DIAL
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc


class Node(kvstore_pb2_grpc.KvstoreServiceServicer):
    """A kvstore that drops one block and whose pool does not answer."""

    async def DropBlocks(self, request: kvstore_pb2.DropBlocksRequest, context: Any) -> Any:
        return kvstore_pb2.DropBlocksResponse(dropped=1, blocks=1, pool_kept=True)


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_drop_reports_that_the_pool_kept_its_copies(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    server = grpc.aio.server()
    kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(Node(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await drop_blocks(Nodes({"kv-0": f"127.0.0.1:{port}"}, PLAIN_DIAL), b"", as_json=as_json)
    finally:
        await server.stop(None)
    output = " ".join(capsys.readouterr().out.split())
    assert ('"pool_kept": true' if as_json else "the pool did not answer: it has kept its copies") in output
