"""A link between two tiers is cut, reset, blackholed, slowed or throttled while streams run, and heals.

The workers are processes with the fake engine, the router is in this process, and every link has a fault
proxy, also the links that carry KV bytes. No request fails, no answer differs, and afterwards every link is
in use again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from bench.faults.fault_load import (
    Answer,
    FaultRequest,
    FaultRun,
    answer_of,
    mixed_requests,
    run_streams,
    wrong,
)
from slipstream.v1 import worker_pb2
from tests.support.clusters.disturbance import DECODERS, HELD_FROM, PREFILLERS
from tests.support.clusters.mesh import KV_LINKS, PAGE_BYTES, WAIT_S, Mesh, MeshShape, open_mesh
from tests.support.fixture_dirs import lasting_dir
from tests.support.network.fault_proxy import FaultProxy

LINKS = (
    "router-decode",
    "router-prefill",
    "decode-prefill",
    "workers-kvstore",
    "decode-drafter",
    "client-router",
)
FAULT_S = 3.0
FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "cut": FaultProxy.cut,
    "reset": FaultProxy.reset,
    "blackhole": FaultProxy.blackhole,
    "delay": lambda proxy: proxy.delay(0.1),
    "trickle": lambda proxy: proxy.trickle(20_000),  # a block takes a fifth of a second
}
LOAD = mixed_requests(14, tokens=24)
# Each fault once, spread over the links; `make soak` runs every pair.
PAIRS = tuple(zip(LINKS, ("blackhole", "blackhole", "cut", "trickle", "blackhole", "reset"), strict=True))


# The same for the links that carry KV bytes.
KV_PAIRS = (
    ("prefill-bytes", "blackhole"),
    ("prefill-bytes", "reset"),
    ("kvstore-bytes", "cut"),
    ("kvstore-bytes", "trickle"),
    ("decode-bytes", "delay"),
)
# Few pages in prefill, so that it restores a repeated prompt from the kvstore.
PREFILL = ("--kv-memory-bytes", str(24 * PAGE_BYTES))
DECODE = ("--kv-memory-bytes", str(160 * PAGE_BYTES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    shape = MeshShape(prefill=PREFILL, decode=DECODE)
    with lasting_dir(request, "mesh") as run_dir:
        async with open_mesh(run_dir, shape) as mesh:
            mesh.expected += await answers(mesh, LOAD)
            yield mesh


async def answers(mesh: Mesh, load: Sequence[FaultRequest]) -> list[Answer]:
    """The answers of the load without a fault."""
    async with asyncio.timeout(2 * WAIT_S):
        runs = await run_streams(mesh.client, load)
    assert not [run.error for run in runs if run.error]
    await mesh.idle()
    return [answer_of(run) for run in runs]


async def all_well(mesh: Mesh) -> None:
    """Wait until every worker is in use again and idle: bytes held back by a proxy were processed too."""
    await mesh.all_ready()
    await mesh.idle()


async def harm_link(mesh: Mesh, link: str, fault: str, fresh: Iterator[list[FaultRequest]]) -> None:
    """Half of the streams are in flight when the fault begins, the other half begin then.

    The fault lasts until it has affected a connection."""
    half, struck = len(LOAD) // 2, mesh.struck(link)

    def in_flight(now: Mapping[str, worker_pb2.GetStatusResponse]) -> bool:
        if any(now[name].ledger.sequences or now[name].ledger.handoffs for name in PREFILLERS):
            return False
        return sum(now[name].ledger.sequences for name in DECODERS) == half

    await all_well(mesh)
    runs: list[asyncio.Task[list[FaultRun]]] = []
    async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:

        def ask(load: Sequence[FaultRequest]) -> None:
            runs.append(tasks.create_task(run_streams(mesh.client, load, stagger_s=0.05)))

        with mesh.gate.held(*DECODERS, from_token=HELD_FROM):
            ask(LOAD[:half])
            await mesh.until(in_flight, "streams in flight")
            mesh.set_fault(link, FAULTS[fault])
            ask(LOAD[half:])
            await asyncio.sleep(FAULT_S / 2)
        await asyncio.sleep(FAULT_S / 2)
        while mesh.struck(link) == struck:
            if all(task.done() for task in runs):
                ask(next(fresh))
            await asyncio.sleep(0.05)
        mesh.set_fault(link, FaultProxy.restore)
    first, then, *more = (task.result() for task in runs)
    problems = wrong([*first, *then], mesh.expected)
    problems += [run.error for others in more for run in others if run.error]
    assert not problems, "\n".join(problems)
    await all_well(mesh)
    assert await answers(mesh, LOAD[:4]) == mesh.expected[:4]


async def harm_kv_link(mesh: Mesh, link: str, fault: str, fresh: Iterator[list[FaultRequest]]) -> None:
    """Run new prompts, so that all their KV is sent, until the fault has affected some of it.

    The fake engine checks every byte of KV. Restores from the kvstore follow after a first round, when the
    workers' caches have evicted its blocks.
    """
    way, met, load = mesh.kv_links[link], False, next(fresh)
    while not met:
        before = await answers(mesh, load) if link == "kvstore-bytes" else None
        struck, used = way.struck, way.accepted + way.carried_bytes
        await all_well(mesh)
        async with asyncio.timeout(2 * WAIT_S):
            mesh.set_fault(link, FAULTS[fault])
            asking = asyncio.create_task(run_streams(mesh.client, load, stagger_s=0.05))
            await asyncio.sleep(FAULT_S)
            mesh.set_fault(link, FaultProxy.restore)
            runs = await asking
        await all_well(mesh)
        met = way.struck > struck and way.accepted + way.carried_bytes > used
        problems = wrong(runs, before or await answers(mesh, load))
        assert not problems, "\n".join(problems)
        load = load if met else next(fresh)
    # After the fault the link carries blocks again.
    carried = way.carried_bytes
    while way.carried_bytes < carried + PAGE_BYTES:
        await answers(mesh, load if before else next(fresh))


@pytest.fixture(scope="module")
def fresh() -> Iterator[list[FaultRequest]]:
    """Loads of new prompts."""
    many = mixed_requests(14 * 160, tokens=24)
    return iter([many[at : at + 14] for at in range(14, len(many), 14)])


@pytest.mark.parametrize(("link", "fault"), PAIRS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_faulty_link_fails_nothing(
    mesh: Mesh, link: str, fault: str, fresh: Iterator[list[FaultRequest]]
) -> None:
    await harm_link(mesh, link, fault, fresh)


@pytest.mark.parametrize(("link", "fault"), KV_PAIRS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_faulty_kv_link_fails_nothing(
    mesh: Mesh, link: str, fault: str, fresh: Iterator[list[FaultRequest]]
) -> None:
    await harm_kv_link(mesh, link, fault, fresh)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_fault_on_every_link(mesh: Mesh, fresh: Iterator[list[FaultRequest]]) -> None:
    for link in LINKS:
        for fault in FAULTS:
            await harm_link(mesh, link, fault, fresh)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["socket", "mooncake"])
async def test_every_fault_on_every_kv_link(
    tmp_path: Path, transport: str, fresh: Iterator[list[FaultRequest]]
) -> None:
    shape = MeshShape(prefill=PREFILL, decode=DECODE, transport=transport)
    async with open_mesh(tmp_path, shape) as mesh:
        await answers(mesh, LOAD)
        for link in KV_LINKS:
            for fault in FAULTS:
                await harm_kv_link(mesh, link, fault, fresh)
