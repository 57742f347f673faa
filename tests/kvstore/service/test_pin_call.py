"""The Pin call: its deadline bounds the disk wait, and a cancelled call keeps no lease."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libs.common.cluster.fingerprint import Fingerprint
from libs.common.rpc.serve import ServiceHost
from libs.worker.pins.peers import Peers
from libs.worker.pins.pin_calls import PIN_TIMEOUT_S
from libs.worker.restore.block_fetcher import FetchStats
from libs.worker.restore.prefix_restore import PrefixRestorer
from services.kvstore.core.store import DISK_DEADLINE_S
from services.kvstore.service import ANSWER_MARGIN_S, KvstoreServicer
from slipstream.block_hashes import pack_hashes
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.kvstore.node import FINGERPRINT
from tests.kvstore.store_rig import BLOCK_BYTES, DRAM, NVME, Rig, key, keys
from tests.support.processes.process_checks import eventually
from tests.support.stubs.idle_process import idle_service

MODEL_FINGERPRINT = Fingerprint("m", "t", "c", "float32", 64)


class Call:
    """The part of a gRPC context that the servicer uses."""

    def __init__(self, left_s: float | None) -> None:
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        return self._left_s


def pin_request(*numbers: int) -> kvstore_pb2.PinRequest:
    return kvstore_pb2.PinRequest(
        fingerprint=FINGERPRINT, block_hashes=pack_hashes(keys(*numbers)), owner="r", lease_ms=15_000
    )


def servicer_of(rig: Rig) -> KvstoreServicer:
    transport: Any = rig.transport
    return KvstoreServicer(rig.store, rig.puts, transport, idle_service())


async def test_a_lookup_prefetches_the_disk_blocks(tmp_path: Path) -> None:
    """The blocks are in memory before the prompt's pin arrives."""
    rig = Rig(tmp_path)
    rig.store.start()
    await rig.to_disk_only([1, 2, 3])
    request = kvstore_pb2.LookupRequest(fingerprint=FINGERPRINT, block_hashes=pack_hashes(keys(1, 2, 3, 4)))
    reported = await servicer_of(rig).Lookup(request, cast(Any, Call(None)))
    assert list(reported.tiers) == [NVME] * 3
    await eventually(lambda: rig.store.lookup_local(keys(1, 2, 3, 4)) == [DRAM] * 3)
    pinned = await servicer_of(rig).pin(pin_request(1, 2, 3, 4), cast(Any, Call(None)))
    assert [block.tier for block in pinned.blocks] == [DRAM] * 3
    rig.store.release_pin(pinned.lease_id)
    await rig.store.close(flush_timeout_s=60)
    assert rig.at_rest()
    rig.disk.close()


@pytest.mark.parametrize(
    ("left_s", "expected_s"),
    [
        (None, DISK_DEADLINE_S),
        (60.0, DISK_DEADLINE_S),
        (PIN_TIMEOUT_S, PIN_TIMEOUT_S - ANSWER_MARGIN_S),
        (0.1, 0.0),
    ],
)
async def test_the_disk_wait_leaves_a_margin_for_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float | None, expected_s: float
) -> None:
    rig = Rig(tmp_path)
    asked: list[float] = []
    pin = rig.store.pin

    async def recorded(chain: Any, **named: Any) -> Any:
        asked.append(named.get("disk_wait_s", DISK_DEADLINE_S))
        return await pin(chain, **named)

    monkeypatch.setattr(rig.store, "pin", recorded)
    call: Any = Call(left_s)
    assert not (await servicer_of(rig).pin(pin_request(1), call)).lease_id
    assert asked == [pytest.approx(expected_s)]
    rig.disk.close()


@pytest.mark.parametrize("caught", [True, False], ids=["as gRPC, which catches it", "not caught"])
async def test_a_call_cancelled_during_its_answer_releases_its_pin(tmp_path: Path, caught: bool) -> None:
    rig = Rig(tmp_path)
    await rig.put([1, 2])
    servicer, answered = servicer_of(rig), asyncio.Event()
    context: Any = Call(10.0)

    async def call() -> None:
        try:
            assert (await servicer.pin(pin_request(1, 2), context)).lease_id
            answered.set()
            await asyncio.Event().wait()  # the answer is being sent
        except asyncio.CancelledError:
            if not caught:
                raise

    running = asyncio.create_task(call())
    async with asyncio.timeout(60):
        await answered.wait()
    assert rig.store.pins == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(60):
        while rig.store.pins:
            await asyncio.sleep(0)
    assert rig.at_rest()
    rig.disk.close()


async def test_an_answered_call_keeps_its_pin(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.put([1])
    context: Any = Call(10.0)
    answer = await asyncio.create_task(servicer_of(rig).pin(pin_request(1), context))
    await asyncio.sleep(0)
    assert rig.store.pins == 1
    rig.store.release_pin(answer.lease_id)
    assert rig.at_rest()
    rig.disk.close()


async def test_a_pin_call_ends_the_pins_it_names_even_without_a_block(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.put([1, 2])
    servicer = servicer_of(rig)
    context: Any = Call(10.0)
    first, second = [await servicer.pin(pin_request(number), context) for number in (1, 2)]
    request = pin_request(1)
    request.released.extend([first.lease_id, "not known"])
    third = await servicer.pin(request, context)
    assert rig.store.pins == third.ended_pins == 2
    nothing = pin_request(9)
    nothing.released.extend([second.lease_id, third.lease_id])
    answer = await servicer.pin(nothing, context)
    assert not answer.lease_id and answer.ended_pins == 2
    assert rig.store.pins == 0
    assert rig.at_rest()
    rig.disk.close()


async def test_a_cancelled_restore_ends_its_pin_while_the_disk_hangs(rig: Rig) -> None:
    """Neither the worker nor the kvstore waits for the disk or for the call's time-out."""
    await rig.to_disk_only([1, 2])
    pinning: list[asyncio.Task[Any]] = []
    servicer = servicer_of(rig)

    pin = servicer.pin

    async def recorded_pin(request: kvstore_pb2.PinRequest, context: Any) -> kvstore_pb2.PinResponse:
        command = asyncio.current_task()
        assert command is not None
        pinning.append(command)
        return await pin(request, context)

    servicer.pin = recorded_pin  # type: ignore[method-assign]
    host, peers, fetcher = ServiceHost("127.0.0.1:0"), Peers(), SimpleNamespace(page_bytes=BLOCK_BYTES)
    kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(servicer, host.server)
    await host.start([])
    restorer = PrefixRestorer(
        cast(Any, fetcher), peers, transport_kind="socket", instance="r", fingerprint=MODEL_FINGERPRINT
    )
    rig.io.gate.clear()
    reads = rig.io.reads
    restore = restorer.restore(host.endpoint, keys(1, 2), range(2), first_block=0, stats=FetchStats())
    restoring = asyncio.create_task(restore)
    async with asyncio.timeout(60):
        while rig.io.reads == reads:
            await asyncio.sleep(0.001)
    assert restorer.pins == 1
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    async with asyncio.timeout(60):
        while restorer.pins or not pinning[0].done():
            await asyncio.sleep(0.001)
    # The store's disk time-out is not the reason: the disk has not answered yet.
    assert pinning[0].cancelling()
    assert not rig.io.gate.is_set()
    assert rig.store.pins == 0
    rig.io.gate.set()
    async with asyncio.timeout(60):
        while rig.dram.get(key(2)) is None:  # the completed read serves later pins
            await asyncio.sleep(0.001)
    await peers.close()
    await host.stop(grace_s=0)


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_pin_is_ended_by_its_name_before_during_and_after_its_call(rig: Rig, when: str) -> None:
    """The release may also come while the pin waits for a disk, and may be repeated."""
    await rig.to_disk_only([1, 2])
    servicer, context = servicer_of(rig), cast(Any, Call(30.0))
    release = kvstore_pb2.ReleasePinRequest(lease_id="mine")
    request = pin_request(1, 2)
    request.name = "mine"
    if when == "before":
        await servicer.release_pin(release, context)
    reads = rig.io.reads
    if when == "during":
        rig.io.gate.clear()
    pinning = asyncio.create_task(servicer.pin(request, context))
    if when == "during":
        async with asyncio.timeout(60):
            while rig.io.reads == reads:
                await asyncio.sleep(0.001)
        await servicer.release_pin(release, context)
        rig.io.gate.set()
    pinned = await pinning
    assert bool(pinned.lease_id) == (when == "after")
    assert rig.store.pins == (when == "after")
    await servicer.release_pin(release, context)
    await servicer.release_pin(release, context)
    async with asyncio.timeout(60):
        while not rig.at_rest():
            await asyncio.sleep(0.001)
