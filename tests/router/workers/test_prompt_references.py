"""A conversation through a router before workers that cache prompts and workers that lost them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.request_spec import parse_tokens
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from services.router.workers.prompt_delta import OutgoingPrompt, PromptSender, RemotePromptCache
from services.router.workers.remote_sequence import RemoteSequence
from slipstream.async_client import AsyncClient
from slipstream.block_hashes import unpack_hashes
from slipstream.errors import PrefixUnknown, Unavailable
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import common_pb2, decode_pb2
from tests.router.conftest import WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.router.support.fake_workers import BLOCK_TOKENS, FakeDecode, FakeWorker
from tests.router.support.listeners import SequenceReader
from tests.support.api_keys import tenant_keys

ERROR = common_pb2.FINISH_REASON_ERROR
LEAST_TOKENS = 2 * BLOCK_TOKENS
OPENING = "Where is my order? It left the warehouse yesterday, and it is still not here. " * 8


@pytest.fixture(autouse=True)
def short_prompts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long enough to be named: two blocks."""
    for defaults in (PromptSender.__init__.__kwdefaults__, PromptCache.__init__.__kwdefaults__):
        assert defaults is not None
        monkeypatch.setitem(defaults, "min_tokens", LEAST_TOKENS)


@pytest.fixture
async def cluster(model: FakeModel) -> FakeCluster:
    """Not started."""
    return FakeCluster(model, prefills=1, decodes=1)


def clear_prompts(*workers: FakeWorker) -> None:
    """As a worker whose memory was full."""
    for worker in workers:
        worker.prompts = PromptCache(block_tokens=BLOCK_TOKENS)


async def turns(client: AsyncClient, count: int, *, before: Any = lambda turn: None) -> list[str]:
    """A conversation; `before` each turn something may happen. Returns the answers."""
    messages: list[dict[str, str]] = [{"role": "user", "content": OPENING}]
    answers = []
    for turn in range(count):
        before(turn)
        reply = await client.chat(messages, temperature=0.0, max_tokens=24, session="talk")
        answers.append(reply.text)
        messages.append({"role": "assistant", "content": reply.text})
        messages.append({"role": "user", "content": f"And {turn}?"})
    return answers


async def run(cluster: FakeCluster, card: ModelCard, count: int, **options: Any) -> list[str]:
    """A conversation from an empty start, at the end of which nothing is held."""
    async with cluster, open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        answers = await turns(client, count, **options)
        await eventually(lambda: not cluster.held)
        return answers


@pytest.fixture
async def expected(model: FakeModel, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The answers to prompts that are sent whole."""
    whole = FakeCluster(model, prefills=1, decodes=1)
    with monkeypatch.context() as patch:
        patch.setattr(RemotePromptCache, "known_blocks", lambda self, hashes: 0)
        answers = await run(whole, card, 4)
    for worker in (*whole.prefills, *whole.decodes):
        assert worker.prompts.hits == worker.prompts.misses == 0
    return answers


def sent_bytes(cluster: FakeCluster) -> list[tuple[int, int]]:
    """Ids sent with each request to prefill and to decode."""
    prefills, decodes = cluster.prefills[0].requests, cluster.decodes[0].starts
    return [(len(p.prompt) // 4, len(d.prompt) // 4) for p, d in zip(prefills, decodes, strict=True)]


async def test_a_turn_sends_what_is_new_in_it(
    cluster: FakeCluster, card: ModelCard, expected: list[str]
) -> None:
    assert await run(cluster, card, 4) == expected
    first, *later = sent_bytes(cluster)
    assert first[0] == first[1] > 100
    assert all(prefill == decode < 80 for prefill, decode in later)
    for worker in (*cluster.prefills, *cluster.decodes):
        assert (worker.prompts.hits, worker.prompts.misses) == (3, 0)


async def test_workers_that_forgot_are_sent_the_whole_prompt_in_the_same_attempt(
    cluster: FakeCluster, card: ModelCard, expected: list[str]
) -> None:
    def before(turn: int) -> None:
        if turn == 2:
            clear_prompts(*cluster.prefills, *cluster.decodes)

    assert await run(cluster, card, 4, before=before) == expected
    for worker in (*cluster.prefills, *cluster.decodes):
        assert (worker.prompts.hits, worker.prompts.misses) == (1, 1)  # since then
    requests = cluster.prefills[0].requests
    assert [bool(r.prefix.blocks) for r in requests] == [False, True, True, False, True]
    assert {r.attempt.attempt for r in requests} == {1}
    assert {r.attempt.attempt for r in cluster.decodes[0].starts} == {1}
    assert len(cluster.decodes[0].starts) == 5


async def test_a_tenants_prompt_is_not_named_for_another(cluster: FakeCluster, card: ModelCard) -> None:
    tenants = tenant_keys({"key-a": "a", "key-b": "b"})
    async with cluster, open_router(cluster, card, keys=tenants) as router:
        for key in ("key-a", "key-b"):
            async with AsyncClient(router.host.endpoint, api_key=key) as client:
                await turns(client, 2)
    assert [bool(r.prefix.blocks) for r in cluster.prefills[0].requests] == [False, True] * 2
    assert len({r.salt for r in cluster.prefills[0].requests}) == 2


async def test_a_resumed_sequence_names_what_its_workers_know(model: FakeModel, card: ModelCard) -> None:
    """A decode worker dies in the second turn; the other one, which never saw the talk, gets all of it, and
    the prefill worker the name of it and what was emitted."""
    cluster = FakeCluster(model, prefills=1, decodes=2)
    undisturbed = await run(FakeCluster(model, prefills=1, decodes=2), card, 2)

    def before(turn: int) -> None:
        for decode in cluster.decodes:
            decode.fail_after_tokens = 6 if turn == 1 and decode.starts else None

    assert await run(cluster, card, 2, before=before) == undisturbed
    assert [bool(r.prefix.blocks) for r in cluster.prefills[0].requests] == [False, True, True]
    assert cluster.prefills[0].requests[-1].emitted_tokens > 0
    starts = sorted((len(d.starts) for d in cluster.decodes), reverse=True)
    assert starts == [2, 1]
    other = next(d for d in cluster.decodes if len(d.starts) == 1)
    assert not other.starts[0].prefix.blocks
    assert other.starts[0].emitted


def start_again(
    router: RouterServer, decode: FakeDecode, name: str, reader: SequenceReader
) -> RemoteSequence:
    """The first sequence of a worker under another name."""
    link = next(link for link in router.fleet.links() if link.worker.role is Role.DECODE)
    sent = decode.starts[0]
    prompt = OutgoingPrompt(
        parse_tokens(sent.prompt, "prompt"),
        unpack_hashes(sent.block_hashes),
        root=sent.fingerprint.digest,
        salt=sent.salt,
        block_tokens=BLOCK_TOKENS,
    )
    attempt = common_pb2.Attempt(request_id=name, attempt=1)
    request = decode_pb2.StartSequence(attempt=attempt, fingerprint=sent.fingerprint, salt=sent.salt)
    request.sampling.max_tokens = 4
    sequence = router.fleet.decode_stream(link).start(request, prompt, reader)
    sequence.resume()
    return sequence


async def test_an_abort_while_the_worker_asks_for_the_whole_prompt_is_final(
    cluster: FakeCluster, card: ModelCard
) -> None:
    """The whole prompt is not sent for a sequence that was aborted."""
    async with cluster, open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        await turns(client, 1)
        decode = cluster.decodes[0]
        clear_prompts(decode)
        reader = SequenceReader()
        sequence = start_again(router, decode, "unwanted", reader)
        assert sequence.resendable is not None
        assert sequence.resendable.prefix_blocks
        sequence.abort()
        async with asyncio.timeout(WAIT_S):
            arrival = await reader.next()
        assert arrival.ended
        assert arrival.rest is not None
        assert arrival.rest.failure.reason == "PrefixUnknown"
        sequence.close()
        assert [start.attempt.request_id for start in decode.starts[1:]] == ["unwanted"]


async def test_a_sequence_whose_stream_was_broken_off_is_not_sent_again(
    cluster: FakeCluster, card: ModelCard
) -> None:
    """A frame that was read before the stream was cancelled may be taken after it."""
    async with cluster, open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        await turns(client, 1)
        link = next(link for link in router.fleet.links() if link.worker.role is Role.DECODE)
        stream = router.fleet.decode_stream(link)
        sequence = start_again(router, cluster.decodes[0], "lost", SequenceReader())
        stream.break_off(Unavailable("silent"))
        unknown = to_failure(PrefixUnknown("forgotten"))
        late = decode_pb2.SequenceDelta(handle=sequence.handle, failure=unknown, finish_reason=ERROR)
        stream.dispatch(decode_pb2.DecodeResponse(deltas=[late]))
        assert not stream.waiting_commands
        assert not stream.is_open
        sequence.close()


async def test_after_a_broken_stream_nothing_is_named_that_was_not_sent_on_the_new_one(
    cluster: FakeCluster, card: ModelCard
) -> None:
    """The next process at that address may be older, and would take the rest for the whole prompt."""

    async with cluster, open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:

        async def break_streams() -> None:
            for link in router.fleet.links():
                if link.worker.role is Role.DECODE:
                    router.fleet.decode_stream(link).break_off(Unavailable("cut"))
                elif link.worker.role is Role.PREFILL:
                    link.prefills._call.grpc_call.cancel()  # type: ignore[union-attr]
                    await eventually(lambda link=link: not link.prefills.is_open)  # type: ignore[misc]

        await turns(client, 2)
        await break_streams()
        await turns(client, 2)
    for requests in (cluster.prefills[0].requests, cluster.decodes[0].starts):
        assert [bool(request.prefix.blocks) for request in requests] == [False, True, False, True]


async def test_what_runs_keeps_no_copy_of_its_prompt_for_sending_it_again(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with cluster, open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        await turns(client, 1)
        reader = SequenceReader()
        sequence = start_again(router, cluster.decodes[0], "runs", reader)
        assert sequence.resendable is not None
        prompt = sequence.resendable.prompt
        assert prompt._packed
        async with asyncio.timeout(WAIT_S):
            while not (await reader.next()).ended:
                pass
        assert sequence.resendable is None
        assert not prompt._packed
        sequence.close()
