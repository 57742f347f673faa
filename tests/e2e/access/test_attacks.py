"""Calls that drained routers, dropped blocks and made workers dial strangers: none has an effect now."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from libs.common.block_hash import chain_hashes
from slipstream.block_hashes import pack_hashes
from slipstream.errors import Unauthenticated
from slipstream.operator_access import operator_dial
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.dial import PLAIN_DIAL
from slipstream.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
)
from supervisor.commands.drain import drain_process, undrain_process
from tests.e2e.access.keyed_cluster import CALL_S, PUBLIC_PORT, KeyedCluster, keyed_cluster
from tests.support.clusters.local_cluster import PATIENCE_S, until
from tests.support.fixture_dirs import lasting_dir
from tests.worker.nodes import attempt, greedy, packed, prompt_tokens

HELLO = [{"role": "user", "content": "We are open from 8:00 to 17:00. " * 40}]
BLOCK_TOKENS = 64
NO_OPERATORS = (CallerClass.PUBLIC, CallerClass.TENANT, CallerClass.PEER)


class Stranger:
    """A listener that belongs to no worker, and counts who connects."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            peer.close()

    def close(self) -> None:
        """Accept no more."""
        self._socket.close()


@pytest.fixture(scope="module")
def keyed(request: pytest.FixtureRequest) -> Iterator[KeyedCluster]:
    with lasting_dir(request, "attacked") as run_dir, keyed_cluster(run_dir) as running:
        yield running


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    listener = Stranger()
    with socket.create_connection(("127.0.0.1", listener.port)):  # it does listen
        until(lambda: listener.connections == 1, what="the listener accepts")
    listener.connections = 0
    yield listener
    listener.close()


def answers(keyed: KeyedCluster) -> None:
    with keyed.client() as client:
        assert client.chat(HELLO, max_tokens=4).usage is not None


def start_of(keyed: KeyedCluster, instance: str) -> dict[str, object]:
    """The fields that StartPrefill and StartSequence share, of a prompt with four blocks."""
    fingerprint = keyed.cluster.status(instance).fingerprint
    tokens = prompt_tokens(300)
    hashes = chain_hashes(tokens, root=fingerprint.digest, salt=b"", block_tokens=BLOCK_TOKENS)
    return {
        "handle": 1,
        "attempt": attempt(),
        "fingerprint": fingerprint,
        "prompt": packed(tokens),
        "block_hashes": pack_hashes(hashes),
        "sampling": greedy(4),
    }


@pytest.mark.parametrize("kind", NO_OPERATORS)
def test_only_operators_drain(keyed: KeyedCluster, kind: CallerClass) -> None:
    for port in keyed.ports():
        status = keyed.call(port, "/slipstream.v1.WorkerService/Drain", kind=kind)
        is_refused = status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        assert is_refused or (port == PUBLIC_PORT and status is grpc.StatusCode.UNIMPLEMENTED), port
    assert not any(keyed.cluster.status(name).draining for name in keyed.cluster.workers)
    answers(keyed)


@pytest.mark.parametrize("kind", NO_OPERATORS)
def test_only_operators_drop_blocks(keyed: KeyedCluster, kind: CallerClass) -> None:
    def blocks() -> float:
        return keyed.cluster.status("kvstore-0").counters["slipstream_kvstore_blocks_dram"]

    answers(keyed)
    until(lambda: blocks() > 0, what="the kvstore has blocks")
    before = blocks()
    everything = kvstore_pb2.DropBlocksRequest(all=True)
    status = keyed.call("kvstore-0", "/slipstream.v1.KvstoreService/DropBlocks", everything, kind=kind)
    assert status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    assert blocks() >= before


def test_a_prompt_makes_no_worker_dial_a_stranger(keyed: KeyedCluster, stranger: Stranger) -> None:
    start = prefill_pb2.StartPrefill(
        **start_of(keyed, "prefill-0"),  # type: ignore[arg-type]
        kvstore_endpoint=stranger.endpoint,
        peer_endpoint=stranger.endpoint,
    )
    with grpc.insecure_channel(keyed.cluster.workers["prefill-0"]) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(
            iter([prefill_pb2.PrefillRequest(starts=[start])]),
            timeout=CALL_S,
            metadata=keyed.metadata(CallerClass.PEER, "prefill-0"),
        )
        events = [event for response in call for event in response.events]
        assert events[-1].HasField("first_token"), events  # computed without the stranger
    assert stranger.connections == 0


def test_a_ticket_makes_no_worker_dial_a_stranger(keyed: KeyedCluster, stranger: Stranger) -> None:
    fields = start_of(keyed, "decode-0")
    page_bytes = BLOCK_TOKENS * 64  # of the fake engine
    ticket = prefill_pb2.HandoffTicket(
        handoff_id="h",
        attempt=attempt(),
        fingerprint=fields["fingerprint"],  # type: ignore[arg-type]
        control_endpoint=stranger.endpoint,
        transport=common_pb2.TRANSPORT_SOCKET,
        transport_session=f"{stranger.endpoint}/{'00' * 16}",
        blocks=[prefill_pb2.ExportedBlock(n_bytes=page_bytes)] * 5,
        prompt_tokens=300,
    )
    start = decode_pb2.StartSequence(
        **fields,  # type: ignore[arg-type]
        ticket=ticket.SerializeToString(),
        kvstore_endpoint=stranger.endpoint,
    )
    with grpc.insecure_channel(keyed.cluster.workers["decode-0"]) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(
            iter([decode_pb2.DecodeRequest(starts=[start])]),
            timeout=CALL_S,
            metadata=keyed.metadata(CallerClass.PEER, "decode-0"),
        )
        deltas = [delta for frame in call for delta in frame.deltas]
    assert deltas[-1].failure.reason == "UnknownAddress", deltas
    assert stranger.connections == 0


def test_a_commit_makes_no_kvstore_dial_a_stranger(keyed: KeyedCluster, stranger: Stranger) -> None:
    fingerprint = keyed.cluster.status("prefill-0").fingerprint
    token = keyed.metadata(CallerClass.PEER, "kvstore-0")
    block_hash = time.time_ns().to_bytes(16)
    with grpc.insecure_channel(keyed.cluster.workers["kvstore-0"]) as channel:
        stub = kvstore_pb2_grpc.KvstoreServiceStub(channel)
        reserve = kvstore_pb2.ReserveRequest(
            fingerprint=fingerprint, block_hashes=block_hash, block_bytes=64, owner="prefill-9"
        )
        reserved = stub.Reserve(reserve, timeout=CALL_S, metadata=token)
        assert reserved.wanted == block_hash
        commit = kvstore_pb2.CommitRequest(
            reservation_id=reserved.reservation_id,
            transport=common_pb2.TRANSPORT_SOCKET,
            transport_session=f"{stranger.endpoint}/{'00' * 16}",
            blocks=[
                kvstore_pb2.SourceBlock(block_hash=block_hash, address=4096, n_bytes=64, checksum=bytes(16))
            ],
        )
        with pytest.raises(grpc.RpcError) as refused:
            stub.Commit(commit, timeout=CALL_S, metadata=token)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        cancel = kvstore_pb2.CancelReservationRequest(reservation_id=reserved.reservation_id)
        stub.CancelReservation(cancel, timeout=CALL_S, metadata=token)
    assert stranger.connections == 0


def test_the_command_undoes_a_drain_of_either_kind(keyed: KeyedCluster) -> None:
    run_dir, name = keyed.cluster.run_dir, "decode-0"
    dial = operator_dial(run_dir)
    status = keyed.call(name, "/slipstream.v1.WorkerService/Drain", kind=CallerClass.OPERATOR)
    assert status is grpc.StatusCode.OK
    undrain_process(run_dir, name, timeout_s=CALL_S, dial=dial)
    assert not keyed.cluster.status(name).draining
    drain_process(run_dir, name, timeout_s=PATIENCE_S)
    assert keyed.cluster.state(name) == "drained"
    undrain_process(run_dir, name, timeout_s=PATIENCE_S, dial=dial)
    assert not keyed.cluster.status(name).draining
    with pytest.raises(Unauthenticated):
        undrain_process(run_dir, name, timeout_s=CALL_S, dial=PLAIN_DIAL)
    answers(keyed)


def test_a_drain_is_undone(keyed: KeyedCluster) -> None:
    for port in keyed.cluster.workers:
        for method, message in (
            ("Drain", worker_pb2.DrainRequest()),
            ("Undrain", worker_pb2.UndrainRequest()),
        ):
            for _ in range(2):  # both are idempotent
                name = f"/slipstream.v1.WorkerService/{method}"
                status = keyed.call(port, name, message, kind=CallerClass.OPERATOR)
                assert status is grpc.StatusCode.OK, (port, method)
            assert keyed.cluster.status(port).draining == (method == "Drain")
        for line in ("drained by operator tests at ipv4:127.0.0.1:", "undrained by operator tests at"):
            keyed.cluster.until_logged(port, f"{port} is {line}")
        answers(keyed)
