"""The local etcd: it forgets old revisions soon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from libs.common.etcd.channel import open_channel
from libs.common.etcd.client import EtcdClient
from slipstream.etcd.v3 import etcd_pb2 as pb
from supervisor.etcd import COMPACTION_RETENTION, etcd_command
from tests.support.processes.etcd_process import EtcdProcess


def test_the_local_etcd_compacts_every_five_minutes() -> None:
    command = etcd_command(Path("etcd"), data_dir=Path("data"), client_port=1, peer_port=2)
    assert COMPACTION_RETENTION == "5m"
    assert {"--auto-compaction-mode=periodic", "--auto-compaction-retention=5m"} <= set(command)


async def test_old_revisions_are_compacted_after_the_retention(tmp_path: Path) -> None:
    """With the same command and a retention of one second."""
    with EtcdProcess(tmp_path / "etcd", compaction="1s") as etcd:
        client = EtcdClient([etcd.endpoint], timeout_s=60)
        first = await client.put("/key", b"0")
        channel = open_channel(f"ipv4:{etcd.endpoint}", None, host="127.0.0.1")
        read = channel.unary_unary(
            "/etcdserverpb.KV/Range",
            request_serializer=pb.RangeRequest.SerializeToString,
            response_deserializer=pb.RangeResponse.FromString,
        )
        try:
            async with asyncio.timeout(120):
                while True:
                    await client.put("/key", b"1")  # etcd compacts only after changes
                    call = read(pb.RangeRequest(key=b"/key", revision=first))
                    if await call.code() is grpc.StatusCode.OUT_OF_RANGE:
                        break
                    await asyncio.sleep(0.1)
            assert (await client.get("/key")) is not None
        finally:
            await channel.close()
            await client.close()
