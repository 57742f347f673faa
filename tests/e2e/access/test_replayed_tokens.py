"""A fake worker in discovery gets tokens of the routers, and no real process accepts them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from libs.common.cluster.worker_record import Role, Worker, encode_worker
from libs.common.etcd.access import EtcdAccess
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.peer_token import TOKEN_HEADER, claimed_caller
from slipstream.v1 import common_pb2, worker_pb2
from tests.e2e.access.keyed_cluster import KeyedCluster, keyed_cluster
from tests.support.clusters.local_cluster import until
from tests.support.fixture_dirs import lasting_dir

HELLO = [{"role": "user", "content": "hello"}]
INCARNATION = "fake"
# Methods that a peer may call, by the role of the process.
PEER_METHODS = {
    "router": ["WorkerService/GetStatus", "WorkerService/Drain"],
    "prefill": ["WorkerService/GetStatus", "PrefillService/Prefill", "KvEventService/WatchBlocks"],
    "decode": ["WorkerService/GetStatus", "DecodeService/Decode"],
    "kvstore": ["WorkerService/GetStatus", "KvstoreService/Lookup", "KvstoreService/Reserve"],
    "drafter": ["WorkerService/GetStatus", "DrafterService/Draft"],
}
PUBLIC_METHODS = ["RouterService/ListModels", "RouterService/ListWorkers"]


class FakeWorker(grpc.GenericRpcHandler):
    """Answers GetStatus as the decode worker that it announces, and keeps the tokens of all calls."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.tokens: set[str] = set()
        self._ended = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((self,))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self.tokens |= {str(value) for name, value in details.invocation_metadata if name == TOKEN_HEADER}
        if details.method.endswith("/GetStatus"):
            return grpc.unary_unary_rpc_method_handler(self._status)
        return grpc.stream_stream_rpc_method_handler(self._hold)

    def _status(self, request: bytes, context: Any) -> bytes:
        return worker_pb2.GetStatusResponse(
            role=common_pb2.WORKER_ROLE_DECODE, instance=self.instance, incarnation=INCARNATION
        ).SerializeToString()

    def _hold(self, requests: Any, context: Any) -> Iterator[bytes]:
        self._ended.wait(300)
        yield from ()

    def close(self) -> None:
        """End all calls."""
        self._ended.set()
        self._server.stop(None)


@pytest.fixture(scope="module")
def keyed(request: pytest.FixtureRequest) -> Iterator[KeyedCluster]:
    with lasting_dir(request, "replayed") as run_dir, keyed_cluster(run_dir) as running:
        yield running


async def write_record(etcd: str, worker: Worker) -> None:
    client = EtcdAccess(etcd).open()
    try:
        await client.put(worker.key, encode_worker(worker))
    finally:
        await client.close()


def announce(keyed: KeyedCluster, instance: str, endpoint: str) -> None:
    """What any process can do that reaches the etcd of a local cluster."""
    etcd = keyed.cluster.supervisor.record().etcd
    asyncio.run(write_record(etcd, Worker(Role.DECODE, instance, endpoint, INCARNATION)))


def methods_of(port: str) -> list[str]:
    return PUBLIC_METHODS if port.endswith("public") else PEER_METHODS[port.rpartition("-")[0]]


def answers(keyed: KeyedCluster) -> None:
    with keyed.client() as client:
        assert client.chat(HELLO, max_tokens=4).usage is not None


def test_a_token_that_a_fake_worker_received_opens_no_other_process(keyed: KeyedCluster) -> None:
    answers(keyed)
    fake = FakeWorker("decode-9")
    try:
        announce(keyed, "decode-9", fake.endpoint)
        until(lambda: fake.tokens, what="a router called the fake worker")
        token = sorted(fake.tokens)[0]
        assert claimed_caller(token) == "peer router-0"
        for port in keyed.ports():
            for method in methods_of(port):
                name = f"/slipstream.v1.{method}"
                status = keyed.call(port, name, metadata=((TOKEN_HEADER, token),))
                assert status is grpc.StatusCode.UNAUTHENTICATED, (port, method, status)
            # The same call with a token for this process is admitted: the audience makes the difference.
            if not port.endswith("public"):
                status = keyed.call(port, "/slipstream.v1.WorkerService/GetStatus", kind=CallerClass.PEER)
                assert status is grpc.StatusCode.OK, port
        refusals = keyed.cluster.until_logged("prefill-0", "refuses peer router-0")
        assert all("WARNING" in line and fake.endpoint in line for line in refusals)
        log = (keyed.cluster.run_dir / "logs" / "prefill-0.log").read_text()
        assert token.rpartition(":")[2] not in log and token not in log
        answers(keyed)
    finally:
        fake.close()


def test_a_fake_worker_at_a_real_address_is_sent_nothing(keyed: KeyedCluster) -> None:
    """Its tokens go to the process that they are for."""
    announce(keyed, "decode-8", keyed.cluster.workers["decode-0"])
    keyed.cluster.until_logged("router-0", " is decode/decode-0")  # the router asked who is there
    log = (keyed.cluster.run_dir / "logs" / "router-0.log").read_text()
    assert "gets no requests" not in log  # the process there accepts the token, and is another
    answers(keyed)
