"""A prefill worker whose KV no decode worker can read holds no request up for long."""

from __future__ import annotations

from libs.common.fleet_bounds import MAX_UNREAD_HANDOFFS
from services.router.request.model_card import ModelCard
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel


async def test_a_decode_worker_that_reads_no_kv_computes_the_prompt(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    """One decode worker is left, and the address of a prefill worker's KV is wrong."""
    await cluster.decodes[1].kill()
    text = (await client.chat(HELLO, seed=1)).text
    cluster.decodes[0].reads_no_kv = True
    reply = await client.chat(HELLO, seed=1)
    assert reply.text == text
    assert reply.stats is not None
    assert (reply.stats.prefill_worker, reply.stats.attempts <= 1 + len(cluster.prefills)) == ("", True)
    await eventually(lambda: not cluster.held)


async def test_few_prefill_workers_compute_a_prompt_that_no_decode_worker_reads(
    model: FakeModel, card: ModelCard
) -> None:
    """Each of many prefill workers would compute the whole prompt, one after the other."""
    async with FakeCluster(model, prefills=8, decodes=2) as cluster, open_router(cluster, card) as router:
        async with AsyncClient(router.host.endpoint) as client:
            text = (await client.chat(HELLO, seed=1)).text
            for prefill in cluster.prefills:
                prefill.requests.clear()
            for decode in cluster.decodes:
                decode.reads_no_kv = True
            reply = await client.chat(HELLO, seed=1)
        assert reply.text == text
        assert reply.stats is not None
        assert reply.stats.prefill_worker == ""
        assert sum(len(prefill.requests) for prefill in cluster.prefills) <= MAX_UNREAD_HANDOFFS
        await eventually(lambda: not cluster.held)
