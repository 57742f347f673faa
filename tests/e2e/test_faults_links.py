"""A link between two tiers is cut, reset, swallowed, slowed or throttled while streams run, and heals.

The workers are processes of their own (fake engine); the router is this process's; every link passes
through a proxy that can misbehave, those of the KV bytes included. Nothing may fail or differ, and
afterwards all is as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from bench.fault_load import Answer, FaultRequest, FaultRun, answer_of, mixed_requests, run_streams, wrong
from tests.support.fault_proxy import FaultProxy
from tests.support.mesh import KV_LINKS, PAGE_BYTES, WAIT_S, Mesh, MeshShape, open_mesh

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
LOAD = mixed_requests(14, tokens=64)
# One of each, spread over the links; `make soak` runs every pair.
PAIRS = tuple(zip(LINKS, ("blackhole", "blackhole", "cut", "trickle", "blackhole", "reset"), strict=True))


# As many of the ways of the KV bytes.
KV_PAIRS = (
    ("prefill-bytes", "blackhole"),
    ("prefill-bytes", "reset"),
    ("kvstore-bytes", "cut"),
    ("kvstore-bytes", "trickle"),
    ("decode-bytes", "delay"),
)
# Few pages in prefill: what it computed before it restores from the kvstore when it is asked for again.
PREFILL = ("--kv-memory-bytes", str(24 * PAGE_BYTES))
DECODE = ("--kv-memory-bytes", str(160 * PAGE_BYTES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    shape = MeshShape(prefill=PREFILL, decode=DECODE)
    async with open_mesh(tmp_path_factory.mktemp("mesh"), shape) as mesh:
        mesh.expected += await answers(mesh, LOAD)
        yield mesh


async def answers(mesh: Mesh, load: Sequence[FaultRequest]) -> list[Answer]:
    """Of a load that nothing disturbs."""
    async with asyncio.timeout(2 * WAIT_S):
        runs = await run_streams(mesh.client, load)
    assert not [run.error for run in runs if run.error]
    await mesh.idle()
    return [answer_of(run) for run in runs]


async def run_with_fault(
    mesh: Mesh, link: str, fault: str, load: Sequence[FaultRequest], *, after_tokens: int
) -> list[FaultRun]:
    """The link misbehaves for a while, after so many tokens (-1: at once); all is well again afterwards."""
    struck = asyncio.Event()

    async def misbehave() -> None:
        await struck.wait()
        mesh.set_fault(link, FAULTS[fault])
        await asyncio.sleep(FAULT_S)
        mesh.set_fault(link, FaultProxy.restore)

    seen = 0

    def on_event(tokens: int) -> None:
        nonlocal seen
        seen += tokens
        if seen > after_tokens:
            struck.set()

    # Released is what the proxy held back too, before the ids are used again.
    await mesh.idle()
    faulty = asyncio.create_task(misbehave())
    on_event(0)
    async with asyncio.timeout(2 * WAIT_S):
        runs = await run_streams(mesh.client, load, on_event=on_event, stagger_s=0.05)
        await faulty
    await mesh.all_ready()
    await mesh.idle()
    return runs


async def harm_link(mesh: Mesh, link: str, fault: str) -> None:
    runs = await run_with_fault(mesh, link, fault, LOAD, after_tokens=30)
    problems = wrong(runs, mesh.expected)
    assert not problems, "\n".join(problems)
    async with asyncio.timeout(WAIT_S):
        assert wrong(await run_streams(mesh.client, LOAD[:4]), mesh.expected[:4]) == []
    await mesh.idle()


async def harm_kv_link(mesh: Mesh, link: str, fault: str, fresh: Iterator[list[FaultRequest]]) -> None:
    """New prompts, so that all their KV travels; the fake engine proves every byte that it computes on.

    What the kvstore has is asked of it after a first round has left the workers' caches.
    """
    load, way = next(fresh), mesh.kv_links[link]
    before = await answers(mesh, load) if link == "kvstore-bytes" else None
    used = way.accepted + way.carried_bytes
    runs = await run_with_fault(mesh, link, fault, load, after_tokens=-1)
    assert way.accepted + way.carried_bytes > used, "nobody read this way"
    problems = wrong(runs, before or await answers(mesh, load))
    assert not problems, "\n".join(problems)
    # Healed: blocks come this way again.
    carried = way.carried_bytes
    async with asyncio.timeout(WAIT_S):
        while way.carried_bytes < carried + PAGE_BYTES:
            await answers(mesh, load if before else next(fresh))


@pytest.fixture(scope="module")
def fresh() -> Iterator[list[FaultRequest]]:
    """Loads of prompts that were never asked."""
    many = mixed_requests(14 * 160, tokens=32)
    return iter([many[at : at + 14] for at in range(14, len(many), 14)])


@pytest.mark.parametrize(("link", "fault"), PAIRS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_link_that_misbehaves_harms_nothing(mesh: Mesh, link: str, fault: str) -> None:
    await harm_link(mesh, link, fault)


@pytest.mark.parametrize(("link", "fault"), KV_PAIRS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_way_of_kv_bytes_that_misbehaves_harms_nothing(
    mesh: Mesh, link: str, fault: str, fresh: Iterator[list[FaultRequest]]
) -> None:
    await harm_kv_link(mesh, link, fault, fresh)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_fault_on_every_link(mesh: Mesh) -> None:
    for link in LINKS:
        for fault in FAULTS:
            await harm_link(mesh, link, fault)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["socket", "mooncake"])
async def test_every_fault_on_every_way_of_kv_bytes(
    tmp_path: Path, transport: str, fresh: Iterator[list[FaultRequest]]
) -> None:
    shape = MeshShape(prefill=PREFILL, decode=DECODE, transport=transport, first_port_seed=8)
    async with open_mesh(tmp_path, shape) as mesh:
        await answers(mesh, LOAD)
        for link in KV_LINKS:
            for fault in FAULTS:
                await harm_kv_link(mesh, link, fault, fresh)
