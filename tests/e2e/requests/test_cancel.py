"""Every tier releases a request that is cancelled, at every stage and in both ways.

Workers are separate processes; slow links and a slow engine keep the request at its stage until it is
ended there. `python -m bench.cancel` measures how long it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest
import pytest_asyncio

from slipstream.async_client import AsyncStream
from slipstream.errors import Aborted
from slipstream.v1 import worker_pb2
from tests.support.clusters.mesh import PAGE_BYTES, WAIT_S, Mesh, MeshShape, open_mesh
from tests.support.fixture_dirs import lasting_dir
from tests.support.network.fault_proxy import FaultProxy

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES = 14
WORDS = 130  # more than half of the pages
_numbers = itertools.count()

Statuses = Mapping[str, worker_pb2.GetStatusResponse]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """One worker of each tier, slow, and with room for one long prompt."""
    slow = ("--fake-pace-s", "0.0015", "--step-tokens", "32")
    memory = ("--kv-memory-bytes", str(PAGES * PAGE_BYTES))
    decode = ("--drafts", "on", *slow, *memory)
    shape = MeshShape(workers=1, prefill=(*slow, *memory), decode=decode)
    with lasting_dir(request, "cancel") as run_dir:
        async with open_mesh(run_dir, shape) as mesh:
            yield mesh


@pytest.fixture(autouse=True)
def _links_are_well_before(mesh: Mesh) -> None:
    for link in (*mesh.links, *mesh.kv_links):
        mesh.set_fault(link, FaultProxy.restore)


class Request:
    """A stream whose events a task reads."""

    def __init__(self, mesh: Mesh, prompt: str, *, max_tokens: int = 200) -> None:
        self.request_id = f"cancel-{next(_numbers)}"
        self.tokens = 0
        self.stream: AsyncStream = mesh.client.stream_complete(
            prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, request_id=self.request_id
        )
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            self.tokens = event.completion_tokens

    async def ended(self) -> None:
        """Assert that the stream was cancelled, here or by `Abort`, before its last token."""
        (outcome,) = await asyncio.gather(self.reading, return_exceptions=True)
        assert isinstance(outcome, Aborted | asyncio.CancelledError), outcome


def long_prompt(words: int = WORDS) -> str:
    """A prompt that shares no block with another; all have about the same length."""
    number = next(_numbers)
    return f"{number} " + " ".join(f"order {(number + i) % 100}" for i in range(words))


def waiting(now: Statuses) -> bool:
    return any(status.load.requests_waiting for status in now.values())


async def comes_to(
    mesh: Mesh,
    request: Request,
    stage: Callable[[Statuses, Request], bool],
    *,
    past_tokens: int,
    what: str,
) -> bool:
    """Whether the request reaches the stage; False, and the request is ended, after `past_tokens` tokens."""
    at_stage = False

    def there_or_past(now: Statuses) -> bool:
        nonlocal at_stage
        at_stage = stage(now, request)
        return at_stage or request.tokens > past_tokens

    await mesh.until(there_or_past, what)
    if not at_stage:
        request.stream.close()
        await request.ended()
    return at_stage


# ---- the stages: each starts a request and returns it when it has reached the stage


@contextlib.asynccontextmanager
async def queued(mesh: Mesh) -> AsyncIterator[Request]:
    """The request waits behind another prompt that has the pages."""
    with mesh.gate.held("prefill-0"):
        first = Request(mesh, long_prompt())
        await mesh.until(lambda now: now["prefill-0"].ledger.handoffs == 1, "the first has its pages")
        request = Request(mesh, long_prompt())
        await mesh.until(waiting, "the second waits for pages")
        yield request
        first.stream.close()
        await first.ended()


@contextlib.asynccontextmanager
async def in_prefill(mesh: Mesh) -> AsyncIterator[Request]:
    def computing(now: Statuses) -> bool:
        return bool(now["prefill-0"].ledger.handoffs and now["prefill-0"].load.prefill_tokens_in_flight)

    with mesh.gate.held("prefill-0"):
        request = Request(mesh, long_prompt())
        await mesh.until(computing, "a prompt is being computed")
        yield request


@contextlib.asynccontextmanager
async def in_pull(mesh: Mesh) -> AsyncIterator[Request]:
    """Decode reads blocks over a slow link."""
    mesh.set_fault("prefill-bytes", lambda proxy: proxy.trickle(2000))
    with mesh.gate.held("decode-0"):
        request = Request(mesh, long_prompt())
        await mesh.until(lambda now: now["decode-0"].ledger.transfers, "decode reads KV")
        yield request


@contextlib.asynccontextmanager
async def decoding(mesh: Mesh) -> AsyncIterator[Request]:
    """The request has drafts. Decode continues without a slow drafter: then the next request is tried."""

    def drafts(now: Statuses, request: Request) -> bool:
        return request.tokens > 3 and bool(now["drafter-0"].ledger.sequences)

    for _ in range(10):
        with mesh.gate.held("decode-0", from_token=200):
            request = Request(mesh, long_prompt(20), max_tokens=600)
            if await comes_to(mesh, request, drafts, past_tokens=150, what="drafts are made"):
                yield request
                return
        await mesh.idle()
    raise AssertionError("no drafts were made")


@contextlib.asynccontextmanager
async def restoring(mesh: Mesh) -> AsyncIterator[Request]:
    """A worker reads blocks from the kvstore over a slow link. Without a timely answer it computes them: then
    the next prompt is tried."""

    def reads(now: Statuses, _: Request) -> bool:
        transfers = any(now[name].ledger.transfers for name in ("prefill-0", "decode-0"))
        return bool(now["kvstore-0"].ledger.pins) and transfers

    for _ in range(10):
        prompt = long_prompt()
        for other in (prompt, long_prompt()):  # the second prompt evicts the pages of the first
            await mesh.client.complete(other, max_tokens=1, temperature=0.0, timeout_s=WAIT_S)
            await mesh.idle()
        mesh.set_fault("kvstore-bytes", lambda proxy: proxy.trickle(2000))
        with mesh.gate.held("decode-0"):
            request = Request(mesh, prompt)
            if await comes_to(mesh, request, reads, past_tokens=0, what="blocks are read"):
                yield request
                return
        mesh.set_fault("kvstore-bytes", FaultProxy.restore)
        await mesh.idle()
    raise AssertionError("the kvstore was never read")


STAGES = (queued, in_prefill, in_pull, decoding, restoring)


async def cancel(mesh: Mesh, request: Request) -> None:
    request.stream.close()


async def abort(mesh: Mesh, request: Request) -> None:
    """Check that the workers hold nothing of the request when `Abort` has returned."""
    await mesh.client.abort(request.request_id, timeout_s=WAIT_S)


@pytest.mark.parametrize("end", [cancel, abort], ids=lambda end: end.__name__)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_every_tier_releases_the_request(
    mesh: Mesh,
    stage: Callable[[Mesh], contextlib.AbstractAsyncContextManager[Request]],
    end: Callable[[Mesh, Request], Awaitable[None]],
) -> None:
    await mesh.idle()
    async with stage(mesh) as request:
        assert not request.reading.done()
        await end(mesh, request)
        await request.ended()
    # Sequences, pages, handoffs, pins, reservations, reads, quarantined memory, the drafter's contexts.
    await mesh.idle()
    await mesh.until(_nothing_quarantined, "no memory waits for late bytes")
    for link in (*mesh.links, *mesh.kv_links):
        mesh.set_fault(link, FaultProxy.restore)
    reply = await mesh.client.complete(long_prompt(20), max_tokens=2, temperature=0.0, timeout_s=WAIT_S)
    assert reply.finish_reason == "length"


async def test_an_abort_returns_when_the_workers_hold_nothing(mesh: Mesh) -> None:
    await mesh.idle()
    async with in_prefill(mesh) as request:
        await abort(mesh, request)
        for name in ("prefill-0", "decode-0"):
            ledger = (await mesh.status(name)).ledger
            assert (ledger.sequences, ledger.handoffs, ledger.transfers) == (0, 0, 0), name
        await request.ended()


def _nothing_quarantined(now: Statuses) -> bool:
    return not any(status.counters.get("slipstream_kv_quarantined_bytes", 0) for status in now.values())
