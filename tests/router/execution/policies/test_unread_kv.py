"""A prefill worker whose KV no decode worker can read holds no request up for long."""

from __future__ import annotations

from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, eventually
from tests.router.support.fake_cluster import FakeCluster


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
