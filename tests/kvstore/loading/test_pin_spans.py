"""A pin that carries a context is a span below it, and so is what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from libs.common.telemetry import tracing
from services.kvstore.core.load_group import LoadGroup
from services.kvstore.service import KvstoreServicer
from slipstream.block_hashes import pack_hashes
from slipstream.v1 import kvstore_pb2
from tests.kvstore.node import FINGERPRINT
from tests.kvstore.store_rig import BLOCK_BYTES, Rig, keys
from tests.support.processes.process_checks import eventually
from tests.support.recorded_spans import PARENT, KeptSpans, kept_spans, parts, said
from tests.support.stubs.idle_process import idle_service


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    with kept_spans() as kept:
        yield kept


async def pin(rig: Rig, numbers: Sequence[int], *, trace: dict[str, str]) -> kvstore_pb2.PinResponse:
    transport: Any = rig.transport
    call: Any = SimpleNamespace(time_remaining=lambda: 60.0)
    servicer = KvstoreServicer(rig.store, rig.puts, transport, idle_service())
    request = kvstore_pb2.PinRequest(
        fingerprint=FINGERPRINT, block_hashes=pack_hashes(keys(*numbers)), max_blocks=4, trace=trace
    )
    return await servicer.pin(request, call)


async def test_a_pin_and_its_load_from_disk_are_in_the_trace_of_the_reader(rig: Rig, kept: KeptSpans) -> None:
    await rig.to_disk_only([2, 3])
    await rig.put([1])
    pinned = await pin(rig, [1, 2, 3, 4, 5], trace={"traceparent": PARENT})
    load, above = kept.one("load"), kept.one("pin")
    assert above.context is not None
    assert parts(above) == (int("a" * 32, 16), int("b" * 16, 16))
    assert parts(load) == (above.context.trace_id, above.context.span_id)
    assert said(above) == {
        "wanted_blocks": 4,
        "blocks": 3,
        "bytes": 3 * BLOCK_BYTES,
        "tiers": "dram,nvme",
    }
    assert said(load) == {"tier": "nvme", "wanted_blocks": 2, "blocks": 2, "bytes": 2 * BLOCK_BYTES}
    rig.store.release_pin(pinned.lease_id)


async def test_a_pin_without_a_context_has_no_span(rig: Rig, kept: KeptSpans) -> None:
    await rig.to_disk_only([1])
    pinned = await pin(rig, [1], trace={})
    assert len(pinned.blocks) == 1
    assert kept.names == []
    rig.store.release_pin(pinned.lease_id)


async def test_a_pin_that_is_cancelled_ends_its_spans(rig: Rig, kept: KeptSpans) -> None:
    await rig.to_disk_only([1])
    rig.io.gate.clear()
    reads = rig.io.reads
    task = asyncio.create_task(pin(rig, [1], trace={"traceparent": PARENT}))
    await eventually(lambda: rig.io.reads > reads)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    rig.io.gate.set()
    assert said(kept.one("load"))["blocks"] == 0
    assert said(kept.one("pin")) == {"cancelled": True}
    assert kept.one("pin").status.status_code is not StatusCode.ERROR


async def test_spans_of_pool_reads_name_the_pool(kept: KeptSpans) -> None:
    class Arriving:
        loaded_blocks, loaded_bytes = 1, 100
        ended = False

        async def wait(self, *, timeout_s: float) -> None:
            assert timeout_s > 0

        def close(self) -> None:
            self.ended = True

    arriving = Arriving()
    pool: Any = SimpleNamespace(promote=lambda sizes: arriving)
    with tracing.server_span("pin", {"traceparent": PARENT}), LoadGroup(None, pool) as loads:
        loads.start(keys(1, 2), {keys(1)[0]: 100})
        assert not loads.from_disk
        await loads.wait(until_s=asyncio.get_running_loop().time() + 60)
    assert said(kept.one("load")) == {"tier": "pool", "wanted_blocks": 1, "blocks": 1, "bytes": 100}
    assert arriving.ended
