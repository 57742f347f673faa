"""The links between two prefill workers are cut, reset, blackholed, slowed or throttled during lending.

The workers are processes with the fake engine, which checks every byte of KV, and there is no kvstore. The
second prefill worker calls the first one over one link, and reads its bytes over another. During a fault all
prompts run on the second worker, so nothing else uses the two links.
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
# Each fault and each link once; `make soak` runs every pair.
PAIRS = (("prefill-prefill", "blackhole"), ("prefill-bytes", "cut"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    with lasting_dir(request, "lending-mesh") as run_dir:
        async with open_mesh(run_dir, MeshShape(kvstore=False)) as mesh:
            yield mesh


@pytest.fixture(scope="module")
def fresh() -> Iterator[FaultRequest]:
    """New prompts."""
    return iter(mixed_requests(20_000, tokens=24, words=60))


async def ask(mesh: Mesh, load: list[FaultRequest], worker: str) -> list[FaultRun]:
    """Run the prompts on the given worker. Unseeded requests keep their ids, from which the seed derives.

    On a machine that stalls the router may drop the worker: then the prompts run again."""
    headers = {"x-slipstream-prefill": worker}
    requested = [
        replace(request, arguments={**request.arguments, "session": None, "headers": headers})
        for request in load
    ]
    while True:
        await mesh.all_ready()
        await mesh.idle()
        runs = await run_streams(mesh.client, requested, timeout_s=2 * WAIT_S)
        if not any(GONE in (run.error or "") for run in runs):
            return runs


def lent(runs: list[FaultRun]) -> int:
    """Prompt tokens that came from a peer."""
    return sum(run.reply.usage.cached_by_tier.get("peer", 0) for run in runs if run.reply.usage)


async def asked_of_both(mesh: Mesh, fresh: Iterator[FaultRequest], link: str, fault: str) -> int:
    """Run new prompts on the first worker, then on the second one under a fault of the link ("": no fault).

    Returns the number of tokens lent."""
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
    """Repeat until the fault has affected a connection; then until blocks are lent again.

    The router learns of new blocks shortly after the answers, so a single round may show neither."""
    while not await asked_of_both(mesh, fresh, link, ""):
        pass
    struck = mesh.struck(link)
    while mesh.struck(link) == struck:
        await asked_of_both(mesh, fresh, link, fault)
    while not await asked_of_both(mesh, fresh, link, ""):
        pass


@pytest.mark.parametrize(("link", "fault"), PAIRS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_faulty_link_to_a_lender_fails_nothing(
    mesh: Mesh, fresh: Iterator[FaultRequest], link: str, fault: str
) -> None:
    await harm_lending(mesh, fresh, link, fault)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["socket", "mooncake"])
async def test_every_fault_on_every_link_to_a_lender(
    tmp_path: Path, fresh: Iterator[FaultRequest], transport: str
) -> None:
    async with open_mesh(tmp_path, MeshShape(kvstore=False, transport=transport)) as mesh:
        for link in LENDING:
            for fault in FAULTS:
                await harm_lending(mesh, fresh, link, fault)
