"""Calls that count tokens count texts of any length; prompts that run stay within the context."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiohttp
import pytest

from libs.common.block_hash import as_tokens
from libs.text.tokenizer import Tokenizer
from services.router.api.http.tokens import listed_json
from services.router.request import token_texts
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import bounds
from slipstream.async_client import AsyncClient
from slipstream.errors import InvalidArgument
from tests.router.conftest import MAX_CONTEXT_TOKENS

# One token each: far beyond the context, and some pieces of the tokenizer long.
LONG = "\x01" * 900_000
LONG_BODIES = {
    "/tokenize": {"prompt": LONG[:20_000]},
    "/detokenize": {"tokens": [97] * 2_000},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG[:20_000]}]},
}
N_CHARS = [2_500, len(LONG)]


async def _counts(http: aiohttp.ClientSession, text: str) -> dict[str, int]:
    messages = [{"role": "user", "content": text}]
    found: dict[str, int] = {}
    for name, path, body, field in (
        ("prompt", "/tokenize", {"prompt": text}, "count"),
        ("messages", "/tokenize", {"messages": messages}, "count"),
        ("count_tokens", "/v1/messages/count_tokens", {"messages": messages}, "input_tokens"),
        ("input_tokens", "/v1/responses/input_tokens", {"input": text}, "input_tokens"),
    ):
        async with http.post(path, json=body) as answer:
            said = await answer.json()
            assert answer.status == 200, (name, said)
            assert len(said.get("tokens", ())) == said.get("count", 0)
            found[name] = said[field]
    return found


@pytest.mark.parametrize("n_chars", N_CHARS)
async def test_counts_have_no_bound_of_the_context(router: RouterServer, n_chars: int) -> None:
    text = LONG[:n_chars]
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        short, found = await _counts(http, "\x01"), await _counts(http, text)
        assert found == {name: count - 1 + n_chars for name, count in short.items()}
        assert found["prompt"] == n_chars > MAX_CONTEXT_TOKENS
        # A conversation that cannot run takes no memory of the cache, and is refused where it should run.
        assert router.manager.context.token_cache.n_bytes < 4 * n_chars
        body = {"messages": [{"role": "user", "content": text}]}
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert "leaves no room for an answer" in await answer.text()


async def test_the_sdk_counts_them(router: RouterServer, card: ModelCard) -> None:
    text, messages = LONG[:3_000], [{"role": "user", "content": LONG[:3_000]}]
    async with AsyncClient(router.host.endpoint) as client:
        assert await client.tokenize(text) == card.tokenizer.encode_text(text)
        assert len(await client.tokenize(messages)) > 3_000
        assert len(await client.tokenize(LONG)) == len(LONG)
        with pytest.raises(InvalidArgument, match="leaves no room"):
            await client.complete(text, max_tokens=1)


async def test_a_long_count_takes_turns_with_other_tenants_off_the_event_loop(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its pieces is a turn: the work of another tenant waits for one of them, not for all."""
    threads: set[int] = set()
    encode_piece = Tokenizer._encode_piece

    def noted(tokenizer: Tokenizer, text: str) -> list[int]:
        if len(text) > 1_000:
            threads.add(threading.get_ident())
            started.set()
            assert go_on.acquire(timeout=60)
        return encode_piece(tokenizer, text)

    started, go_on = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(Tokenizer, "_encode_piece", noted)
    pool = router.manager.context.threads
    monkeypatch.setattr(pool, "_free", 1)
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        counting = asyncio.create_task(_post(http, "/tokenize", {"prompt": LONG}))
        await asyncio.to_thread(started.wait, 60)
        other = asyncio.create_task(pool.run("other", lambda: "done"))
        await asyncio.sleep(0)
        assert pool.waiting == 1
        go_on.release(2)  # a step of 32,768 tokens is two pieces of 25,000 characters
        assert await asyncio.wait_for(other, 60) == "done"
        assert not counting.done()
        go_on.release(1_000)
        assert (await counting)["count"] == len(LONG)
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("path", list(LONG_BODIES))
@pytest.mark.parametrize("limit_ms", [20, None])
async def test_a_count_ends_with_its_time_limit(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch, limit_ms: int | None, path: str
) -> None:
    """A request that states none has the default one."""
    if limit_ms is None:
        monkeypatch.setattr(bounds, "DEFAULT_DEADLINE_S", 0.02)
    release = threading.Event()
    pool = router.manager.context.threads
    held = [asyncio.create_task(pool.run("other", lambda: release.wait(60))) for _ in range(pool.size)]
    try:
        async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
            headers = {} if limit_ms is None else {"x-request-timeout-ms": str(limit_ms)}
            async with http.post(path, json=LONG_BODIES[path], headers=headers) as answer:
                assert answer.status == 504
        assert pool.waiting == 0
    finally:
        release.set()
        await asyncio.gather(*held)


async def test_the_texts_of_tokens_are_bounded(router: RouterServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_texts, "MAX_DECODED_TOKENS", 100)
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        for n_chars, status in ((100, 200), (101, 400)):
            body = {"prompt": LONG[:n_chars], "return_token_strs": True}
            async with http.post("/tokenize", json=body) as answer:
                assert answer.status == status, await answer.text()
                said = await answer.json()
        assert said["error"]["param"] == "return_token_strs"


@pytest.mark.parametrize("n_ids", [0, 1, 16_384, 16_385, 40_000])
def test_a_list_of_ids_is_their_json(n_ids: int) -> None:
    ids = list(range(n_ids))
    assert bytes(listed_json(as_tokens(ids))) == str(ids).replace(" ", "").encode()


async def _post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as answer:
        return await answer.json()
