"""The way on which a prefill worker reads what another one has is cut, reset, swallowed, slowed or throttled.

The workers are processes of their own (fake engine, which proves every byte that it computes on), with no
kvstore beside them. The second prefill worker dials the first one by a link of its own, and reads its bytes
through another one. While a link misbehaves all prompts run on the second one: nothing else uses the two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import pytest_asyncio

from bench.faults.fault_load import FaultRequest, FaultRun, answer_of, mixed_requests, run_streams, wrong
from tests.e2e.faults.test_faults_links import FAULTS
from tests.support.clusters.mesh import WAIT_S, Mesh, MeshShape, open_mesh
from tests.support.fixture_dirs import lasting_dir
from tests.support.network.fault_proxy import FaultProxy

LENDING = ("prefill-prefill", "prefill-bytes")
PROMPTS = 6
GONE = "is no ready prefill worker"
# One of each; `make soak` runs every pair.
PAIRS = (("prefill-prefill", "blackhole"), ("prefill-bytes", "cut"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    with lasting_dir(request, "lending-mesh") as run_dir:
        async with open_mesh(run_dir, MeshShape(kvstore=False)) as mesh:
            yield mesh


@pytest.fixture(scope="module")
def fresh() -> Iterator[FaultRequest]:
    """Prompts that were never asked."""
    return iter(mixed_requests(20_000, tokens=24, words=60))


async def ask(mesh: Mesh, load: list[FaultRequest], worker: str) -> list[FaultRun]:
    """The prompts, computed on that worker. A seed that is not given follows from the id, so that stays.
    A machine that stands still may have the router take the worker for gone: then they are asked again."""
    headers = {"x-slipstream-prefill": worker}
    pinned = [
        replace(request, arguments={**request.arguments, "session": None, "headers": headers})
        for request in load
    ]
    while True:
        await mesh.all_ready()
        await mesh.idle()
        runs = await run_streams(mesh.client, pinned, timeout_s=2 * WAIT_S)
        if not any(GONE in (run.error or "") for run in runs):
            return runs


def lent(runs: list[FaultRun]) -> int:
    """Prompt tokens that came from a peer."""
    return sum(run.reply.usage.cached_by_tier.get("peer", 0) for run in runs if run.reply.usage)


async def asked_of_both(mesh: Mesh, fresh: Iterator[FaultRequest], link: str, fault: str) -> int:
    """New prompts, which the first worker computes; then the second one is asked for them while the link
    misbehaves ("": it does not). How many tokens were lent."""
    load = list(islice(fresh, PROMPTS))
    first = await ask(mesh, load, "prefill-0")
    problems = [run.error for run in first if run.error]
    if fault:
        mesh.set_fault(link, FAULTS[fault])
    try:
        second = await ask(mesh, load, "prefill-1")
    finally:
        mesh.set_fault(link, FaultProxy.restore)
    problems += wrong(second, [answer_of(run) for run in first])
    assert not problems, "\n".join(problems)
    await mesh.all_ready()
    await mesh.idle()
    return lent(second)


async def harm_lending(mesh: Mesh, fresh: Iterator[FaultRequest], link: str, fault: str) -> None:
    """Until the fault met somebody; then until blocks are lent again. The router hears of what the first
    worker holds a little later than its answers come, so one round may show neither."""
    while not await asked_of_both(mesh, fresh, link, ""):
        pass
    struck = mesh.struck(link)
    while mesh.struck(link) == struck:
        await asked_of_both(mesh, fresh, link, fault)
    while not await asked_of_both(mesh, fresh, link, ""):
        pass


@pytest.mark.parametrize(("link", "fault"), PAIRS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_way_to_a_lender_that_misbehaves_harms_nothing(
    mesh: Mesh, fresh: Iterator[FaultRequest], link: str, fault: str
) -> None:
    await harm_lending(mesh, fresh, link, fault)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["socket", "mooncake"])
async def test_every_fault_on_every_way_to_a_lender(
    tmp_path: Path, fresh: Iterator[FaultRequest], transport: str
) -> None:
    async with open_mesh(tmp_path, MeshShape(kvstore=False, transport=transport)) as mesh:
        for link in LENDING:
            for fault in FAULTS:
                await harm_lending(mesh, fresh, link, fault)
