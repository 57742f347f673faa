"""The kvstore as a process with real gRPC, transfers, files and kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from libs.common.cluster.discovery import EtcdDiscovery, Fleet
from libs.common.cluster.worker_record import Role
from libs.common.cluster.worker_service import held
from libs.common.etcd.client import EtcdClient
from libs.common.transport.base import KvTransport, TransferTimeout
from libs.common.transport.registered_memory import PageAlignedMemory
from services.kvstore.disk.segment_format import unpack_header, unpack_superblock
from slipstream.block_hashes import pack_hashes
from slipstream.enum_names import TRANSPORTS
from slipstream.errors import Draining, FailedPrecondition, InvalidArgument, NotFound
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import common_pb2, kvstore_pb2, worker_pb2
from slipstream.v1.common_pb2 import CacheTier
from tests.kvstore.node import BLOCK_BYTES, FINGERPRINT, ROOT, Client, KvstoreProcess, key
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.launching import run_service
from tests.support.processes.process_checks import eventually, suspend

DRAM, NVME = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME
ON_DISK = "slipstream_kvstore_blocks_nvme"


BOTH_KINDS = pytest.mark.parametrize("kind", ["mooncake", "socket"], indirect=True)


async def reconnect(node: KvstoreProcess, client: Client) -> Client:
    node.start()
    return Client(node.endpoint, client.transport, client.memory)


@BOTH_KINDS
async def test_stored_blocks_are_served_from_memory_then_from_disk_after_a_restart(
    node: KvstoreProcess, client: Client
) -> None:
    numbers = list(range(20))
    assert await client.lookup(numbers) == []
    assert await client.put(numbers) == 20
    assert await client.lookup([*numbers, 99]) == [DRAM] * 20
    assert await client.fetch(numbers) == [DRAM] * 20
    assert await client.put(numbers) == 0  # a second put stores nothing
    status = await client.wait_status(lambda s: s.counters[ON_DISK] == 20)
    assert status.role == common_pb2.WORKER_ROLE_KVSTORE
    assert status.transport == TRANSPORTS.value(client.transport.kind)
    assert [(eviction.tier, list(eviction.policies)) for eviction in status.evictions] == [
        (common_pb2.CACHE_TIER_DRAM, [worker_pb2.EVICTION_POLICY_HIT_DENSITY]),
        (common_pb2.CACHE_TIER_NVME, [worker_pb2.EVICTION_POLICY_EXPECTED_REUSE]),
    ]
    assert status.counters["slipstream_kv_bytes_pulled_total"] == 20 * BLOCK_BYTES
    assert status.counters["slipstream_kvstore_bytes_dram"] == 20 * BLOCK_BYTES
    assert node.terminate() == 0
    restarted = await reconnect(node, client)
    assert await restarted.lookup(numbers[:8]) == [NVME] * 8
    assert await restarted.fetch(numbers[8:]) == [NVME] * 12
    async with asyncio.timeout(60):  # a lookup prefetches what it finds
        while await restarted.lookup(numbers[:8]) != [DRAM] * 8:
            await asyncio.sleep(0.02)
    assert await restarted.fetch(numbers) == [DRAM] * 20
    counters = (await restarted.status()).counters
    assert counters["slipstream_kvstore_hits_nvme_total"] == 12
    assert counters["slipstream_kvstore_hits_dram_total"] == 20
    await restarted.close()


async def test_sigterm_writes_the_disk_queue(node: KvstoreProcess, client: Client) -> None:
    await client.put(list(range(24)))
    assert node.terminate() == 0  # without a drain time
    restarted = await reconnect(node, client)
    assert await restarted.fetch(list(range(24))) == [NVME] * 24
    await restarted.close()


@BOTH_KINDS
async def test_every_block_found_after_sigkill_is_whole(node: KvstoreProcess, client: Client) -> None:
    async def keep_putting() -> None:
        for start in range(0, 400, 8):
            await client.put(list(range(start, start + 8)))

    putting = asyncio.create_task(keep_putting())
    await client.wait_status(lambda s: s.counters[ON_DISK] >= 10)
    node.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await putting
    restarted = await reconnect(node, client)
    found = 0
    for number in range(400):
        found += len(await restarted.fetch([number]))
    assert found >= 10
    assert (await restarted.status()).counters[
        "slipstream_kvstore_corrupt_blocks_total"
    ] <= 2  # torn by the kill
    await restarted.close()


async def test_a_damaged_disk_block_is_a_miss_and_can_be_stored_again(
    node: KvstoreProcess, client: Client
) -> None:
    await client.put([0, 1, 2, 3])
    assert node.terminate() == 0
    files = sorted((node.directory / "data").glob("segment-*"))
    for file in files:
        image = bytearray(file.read_bytes())
        superblock = unpack_superblock(bytes(image[:4096]))
        assert superblock is not None
        for index in range(superblock.n_slots):
            header = unpack_header(bytes(image[superblock.header_offset(index) :][:4096]))
            if header is not None and header.key == key(2):
                image[superblock.payload_offset(index) + 1234] ^= 1
            file.write_bytes(image)
    restarted = await reconnect(node, client)
    assert await restarted.fetch([0, 1, 2, 3]) == [NVME] * 2
    assert (await restarted.status()).counters["slipstream_kvstore_corrupt_blocks_total"] == 1
    assert await restarted.put([0, 1, 2, 3]) == 1
    # The fetch ended at the damaged block, and the load of the last one goes on or was dropped: a lookup
    # prefetches it.
    async with asyncio.timeout(60):
        while await restarted.lookup([0, 1, 2, 3]) != [DRAM] * 4:
            await asyncio.sleep(0.02)
    assert await restarted.fetch([0, 1, 2, 3]) == [DRAM] * 4
    await restarted.close()


async def test_a_part_of_a_chain_can_be_pinned_and_leases_are_renewed_and_expire(
    shared_client: Client,
) -> None:
    await shared_client.put([1000, 1001, 1002, 1003, 1004])
    part = await shared_client.pin(
        [1000, 1001, 1002, 1003, 1004], first_block=1, max_blocks=3, lease_ms=50_000
    )
    assert len(part.blocks) == 3
    assert part.lease_ms == 50_000
    await shared_client.read(part, [1001, 1002, 1003])
    ledger = (await shared_client.status()).ledger
    assert (ledger.pins, ledger.blocks_held) == (1, 3)
    unreleased = await shared_client.pin([1000], lease_ms=300)
    await shared_client.wait_status(lambda s: s.ledger.pins == 1)  # the lease ends it
    with pytest.raises(NotFound):
        await shared_client.pins.renew(unreleased.lease_id)
    await shared_client.release(unreleased.lease_id)
    await shared_client.pins.renew(part.lease_id)
    await shared_client.release(part.lease_id)
    assert (await shared_client.pin([1007], first_block=0)).lease_id == ""
    assert (await shared_client.pin([1000], first_block=5)).lease_id == ""


async def test_pinned_blocks_survive_a_flood_of_puts(
    tmp_path: Path, kind: str, transport: KvTransport
) -> None:
    node = KvstoreProcess(tmp_path, kind, dram_bytes=8 << 20, disk_bytes=0)
    node.start()
    memory = PageAlignedMemory(64 * BLOCK_BYTES)
    transport.register(memory.buffer)
    client = Client(node.endpoint, transport, memory)
    try:
        await client.put([0, 1, 2])
        pinned = await client.pin([0, 1, 2])
        for start in range(100, 180, 8):
            for _ in range(3):  # what is wanted again takes the place of older blocks
                await client.lookup(list(range(start, start + 8)))
            await client.put(list(range(start, start + 8)))
        assert (await client.status()).counters["slipstream_kvstore_evictions_total"] > 40
        await client.read(pinned, [0, 1, 2])
        await client.release(pinned.lease_id)
        for start in range(200, 232, 8):
            for _ in range(3):
                await client.lookup(list(range(start, start + 8)))
            await client.put(list(range(start, start + 8)))
        assert await client.lookup([0]) == []  # released and oldest: evicted
    finally:
        await client.close()
        assert node.terminate() == 0


async def test_blocks_with_a_wrong_checksum_or_an_unknown_source_are_refused(shared_client: Client) -> None:
    reserved = await shared_client.reserve([2000, 2001])
    good, bad = shared_client.source(0, 2000), shared_client.source(1, 2001)
    bad.checksum = good.checksum
    answer = await shared_client.commit(reserved.reservation_id, [good, bad])
    assert answer.committed == key(2000)
    assert answer.refused == key(2001)
    reserved = await shared_client.reserve([2000, 2001])
    assert reserved.wanted == key(2001)
    outside = shared_client.source(1, 2001)
    outside.address = 4096
    assert (await shared_client.commit(reserved.reservation_id, [outside])).refused == key(2001)
    assert await shared_client.lookup([2000, 2001]) == [DRAM]
    repeated = await shared_client.commit(reserved.reservation_id, [good])  # repeated commits are idempotent
    assert repeated.committed == key(2000)


async def test_expired_and_cancelled_reservations_are_refused(shared_client: Client) -> None:
    first = await shared_client.reserve([3000, 3001])
    assert (await shared_client.status()).ledger.reservations == 1
    assert (await shared_client.reserve([3000, 3001])).reservation_id == ""
    cancel = kvstore_pb2.CancelReservationRequest(reservation_id=first.reservation_id)
    for _ in range(2):
        await shared_client.kvstore.CancelReservation(cancel, timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await shared_client.commit(first.reservation_id, [shared_client.source(0, 3000)])
    assert isinstance(from_rpc_error(caught.value), NotFound)
    assert await shared_client.put([3000, 3001]) == 2


@BOTH_KINDS
async def test_a_writer_killed_before_its_commit_leaves_no_block(
    node: KvstoreProcess, client: Client, kind: str
) -> None:
    session, address = dead_writer(kind)
    reserved = await client.reserve([0, 1])
    blocks = [client.source(0, 0), client.source(1, 1)]
    for index, block in enumerate(blocks):
        block.address = address + index * BLOCK_BYTES
    answer = await client.commit(reserved.reservation_id, blocks, transport_session=session)
    assert answer.committed == b""
    assert answer.refused == key(0) + key(1)


async def test_invalid_input_is_refused_with_its_field(shared_client: Client) -> None:
    lookup = kvstore_pb2.LookupRequest(fingerprint=FINGERPRINT, block_hashes=b"123")
    unknown_model = kvstore_pb2.LookupRequest(block_hashes=key(4001))
    reserve = kvstore_pb2.ReserveRequest(fingerprint=FINGERPRINT, block_hashes=key(4001), block_bytes=1 << 40)
    source = shared_client.source(0, 4000)
    source.checksum = b"short"
    calls: list[tuple[Awaitable[object], str]] = [
        (shared_client.kvstore.Lookup(lookup, timeout=60), "block_hashes"),
        (shared_client.kvstore.Lookup(unknown_model, timeout=60), "fingerprint.digest"),
        (shared_client.kvstore.Reserve(reserve, timeout=60), "block_bytes"),
        (shared_client.commit("x", [source]), "blocks[0].checksum"),
    ]
    for call, field in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == field
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await shared_client.commit(
            "x", [shared_client.source(0, 4000)], transport=common_pb2.TRANSPORT_UNSPECIFIED
        )
    assert isinstance(from_rpc_error(caught.value), FailedPrecondition)


async def drained_in_part(client: Client) -> worker_pb2.DrainResponse:
    """The answer of a Drain shortly before its deadline; a slow machine may miss it."""
    for _ in range(20):
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await client.worker.Drain(worker_pb2.DrainRequest(), timeout=1)
    raise AssertionError("every answer came after its deadline")


async def test_load_is_reported_and_drain_waits_for_leases(client: Client) -> None:
    await client.put([0])
    watch = client.worker.WatchLoad(worker_pb2.WatchLoadRequest(min_interval_ms=10), timeout=60)
    reports = aiter(watch)
    first = (await anext(reports)).load
    pinned = await client.pin([0])
    async with asyncio.timeout(60):
        while (report := (await anext(reports)).load).blocks_held == 0:
            pass
    assert report.sequence > first.sequence
    watch.cancel()

    left = await drained_in_part(client)
    assert left.ledger.pins == 1  # the deadline passed first
    assert await client.readiness() == health_pb2.HealthCheckResponse.NOT_SERVING
    status = await client.status()
    assert status.draining and status.counters["slipstream_draining"] == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.reserve([5])
    assert isinstance(from_rpc_error(caught.value), Draining)
    await client.read(pinned, [0])  # running transfers continue
    draining = asyncio.ensure_future(client.worker.Drain(worker_pb2.DrainRequest(), timeout=60))
    await client.release(pinned.lease_id)
    assert not held((await draining).ledger)


@BOTH_KINDS
async def test_a_stopped_kvstore_delays_a_reader_by_a_bounded_time(
    node: KvstoreProcess, client: Client
) -> None:
    await client.put([0])
    pinned = await client.pin([0])
    suspend(node.process)
    try:
        with pytest.raises(TransferTimeout):
            await client.read(pinned, [0], timeout_s=1)
    finally:
        os.kill(node.process.pid, signal.SIGCONT)
    # Late bytes may still arrive there, so no other read uses that memory until then.
    await eventually(lambda: not client.transport.quarantined_bytes, timeout_s=60)
    await client.read(pinned, [0])
    await client.release(pinned.lease_id)


async def test_a_node_joins_discovery_while_it_serves_and_leaves_it_at_the_end(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path / "etcd") as etcd:
        node = KvstoreProcess(tmp_path, "socket", arguments=["--etcd", etcd.endpoint])
        node.start()
        client = EtcdClient([etcd.endpoint], timeout_s=60)
        try:
            async with Fleet(EtcdDiscovery(client)) as fleet:
                await fleet.wait_until(lambda f: len(f.with_role(Role.KVSTORE)) == 1, timeout_s=60)
                (seen,) = fleet.current.with_role(Role.KVSTORE)
                assert (seen.instance, seen.endpoint) == ("kv-0", node.endpoint)
                assert seen.capacity["dram_bytes"] == node.dram_bytes
                assert await asyncio.to_thread(node.terminate) == 0
                await fleet.wait_until(lambda f: not f.with_role(Role.KVSTORE), timeout_s=60)
                assert not fleet.current.suspects
        finally:
            await client.close()
            if node.process.poll() is None:
                node.kill()


def test_an_unusable_configuration_is_refused_with_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    command = [sys.executable, "-m", "services.kvstore", "--instance", "x", "--run-dir", str(tmp_path)]
    command += ["--transport", "socket"]
    taken = socket.create_server(("127.0.0.1", 0))
    for arguments, words in [
        (["--dram-bytes", "10"], "--dram-bytes: must be at least"),
        (["--disk-bytes", "10"], "--disk-bytes: must be 0 or at least"),
        (["--data-dir", str(tmp_path / "file")], "is not a directory"),
        (["--data-dir", str(tmp_path / "file" / "below")], "cannot be made, or is not writable"),
        (["--data-dir", "/proc/kv"], "/proc/kv cannot be made"),
        (["--transport", "pigeon"], "transport must be auto, mooncake, socket, rdma"),
        (["--transport", "rdma:mlx5_77", "--disk-bytes", "0"], "rdma: no "),
        (
            ["--pool", "mooncake", "--pool-master", "a:1", "--pool-admin", "b"],
            "--pool-admin: must be HOST:PORT",
        ),
        (["--listen", f"127.0.0.1:{taken.getsockname()[1]}"], "cannot listen"),
    ]:
        code, written = run_service([*command, *arguments])
        assert code == 2, written
        assert words in written
    taken.close()


async def test_the_hash_of_another_tenant_or_model_finds_nothing(shared_client: Client) -> None:
    await shared_client.put([5000])
    other = kvstore_pb2.LookupRequest(fingerprint=FINGERPRINT, block_hashes=pack_hashes([b"\xff" * 16]))
    assert (await shared_client.kvstore.Lookup(other, timeout=60)).held_blocks == 0


def dead_writer(kind: str) -> tuple[str, int]:
    """Return the session id and address of a process that has been killed."""
    command = [sys.executable, "-m", "tests.common.transport.peer", kind, str(2 * BLOCK_BYTES), "1"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        ready = json.loads(writer.stdout.readline())
        writer.kill()
    return ready["session"], ready["address"]
