"""What the command line says of the pool that KV stores share."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from libs.common.cluster.worker_record import Role
from slipstream.cli.app import app
from slipstream.cli.kv_change import drop_blocks
from slipstream.cli.kv_nodes import Nodes
from slipstream.cli.status import _state
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc


class Node(kvstore_pb2_grpc.KvstoreServiceServicer):
    """Drops one block; its pool does not answer."""

    async def DropBlocks(self, request: kvstore_pb2.DropBlocksRequest, context: Any) -> Any:
        return kvstore_pb2.DropBlocksResponse(dropped=1, blocks=1, pool_kept=True)


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_drop_says_that_the_pool_has_kept_its_copies(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    server = grpc.aio.server()
    kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(Node(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await drop_blocks(Nodes({"kv-0": f"127.0.0.1:{port}"}, None), b"", as_json=as_json)
    finally:
        await server.stop(None)
    said = " ".join(capsys.readouterr().out.split())
    assert ('"pool_kept": true' if as_json else "the pool did not answer: it has kept its copies") in said


def test_status_says_that_the_pool_is_away() -> None:
    def state(counters: dict[str, float]) -> str:
        return _state(
            {
                "role": Role.KVSTORE,
                "state": "ready",
                "status": {"draining": False, "counters": counters},
            }
        )

    assert state({"slipstream_kvstore_pool_away": 1.0}) == "ready, pool away"
    assert state({"slipstream_kvstore_pool_away": 0.0}) == state({}) == "ready"


def test_the_number_of_masters_has_a_flag_of_its_own() -> None:
    refused = CliRunner().invoke(app, ["up", "--pool-master", "2"])
    assert refused.exit_code == 2
    helped = CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "200"})
    assert "--pool-masters" in helped.output
