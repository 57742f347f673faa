"""Several choices of one request, echoed prompts and waiting streams, before fake workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest

from libs.common.telemetry.counters import Counters
from services.router.request.choices import choice_seed
from services.router.request.model_card import ModelCard
from services.router.request.output_constraints import OutputConstraints
from services.router.server import RouterServer
from slipstream import errors
from slipstream.rpc.dial import dial
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import eventually, script
from tests.router.support.decodings import note_decodings
from tests.router.support.fake_cluster import FakeCluster

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HI: Any = [{"role": "user", "content": "Where is my order? " * 20}]


@pytest.fixture
async def http(router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as session:
        yield session


async def ask(http: aiohttp.ClientSession, path: str = "/v1/chat/completions", **body: Any) -> Any:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def events_of(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    said = [event for event in text.split("\n\n") if event.startswith("data: {")]
    return [json.loads(event.removeprefix("data: ")) for event in said]


async def test_each_choice_is_the_answer_to_its_seed_and_the_prompt_counts_once(
    http: aiohttp.ClientSession, cluster: FakeCluster
) -> None:
    alone = [await ask(http, messages=HI, seed=choice_seed(5, index)) for index in range(3)]
    together = await ask(http, messages=HI, seed=5, n=3)
    texts = [answer["choices"][0]["message"]["content"] for answer in alone]
    assert len(set(texts)) == 3
    assert [choice["message"]["content"] for choice in together["choices"]] == texts
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    usage = together["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(answer["usage"]["completion_tokens"] for answer in alone)
    await eventually(lambda: not cluster.held)


async def test_streamed_choices_are_the_whole_ones_under_one_id(http: aiohttp.ClientSession) -> None:
    whole = await ask(http, messages=HI, seed=5, n=3)
    body = {"messages": HI, "seed": 5, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=body) as answer:
        events = events_of(await answer.text())
    assert len({(event["id"], event["created"]) for event in events}) == 1
    texts = {0: "", 1: "", 2: ""}
    finished: list[int] = []
    for event in events[:-1]:
        (choice,) = event["choices"]
        assert choice["index"] not in finished
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            finished.append(choice["index"])
    assert sorted(finished) == [0, 1, 2]
    assert list(texts.values()) == [choice["message"]["content"] for choice in whole["choices"]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_a_client_that_leaves_ends_all_choices(
    http: aiohttp.ClientSession, router: RouterServer, cluster: FakeCluster
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()
    asking = asyncio.create_task(ask(http, messages=HI, n=4))
    await eventually(lambda: router.manager.held == 4)
    asking.cancel()
    for worker in cluster.decodes:
        worker.gate.set()
    await eventually(lambda: router.manager.held == 0 and not cluster.held)


async def test_choices_share_their_constraint_and_begin_one_in_a_loop_iteration(
    http: aiohttp.ClientSession, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127 choices with a long schema held the loop for 0.2 s: each looked it up, all at the first token."""
    iterations, began, made = 0, [], []
    begin, make = router.manager.begin, OutputConstraints.make

    async def count_iterations() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    async def noted_begin(*given: Any, **named: Any) -> Any:
        began.append(iterations)
        return await begin(*given, **named)

    def noted_make(*given: Any) -> Any:
        made.append(given)
        return make(*given)

    monkeypatch.setattr(router.manager, "begin", noted_begin)
    monkeypatch.setattr(OutputConstraints, "make", noted_make)
    counting = asyncio.create_task(count_iterations())
    try:
        answer = await ask(http, messages=HI, n=8, tools=[TOOL])
    finally:
        counting.cancel()
    assert len(answer["choices"]) == 8
    assert len(began) == len(set(began)) == 8
    assert len(made) == 1


async def test_lists_of_prompts_are_answered_in_order_with_the_echo(http: aiohttp.ClientSession) -> None:
    alone = [await ask(http, "/v1/completions", prompt=text, seed=1, max_tokens=6) for text in ("one", "two")]
    together = await ask(http, "/v1/completions", prompt=["one", "two"], seed=1, max_tokens=6, echo=True)
    texts = [text + answer["choices"][0]["text"] for text, answer in zip(("one", "two"), alone, strict=True)]
    assert [choice["text"] for choice in together["choices"]] == texts
    prompt_tokens = sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert together["usage"]["prompt_tokens"] == prompt_tokens


async def test_token_ids_are_a_prompt_and_may_be_echoed_alone(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    ids = card.tokenizer.encode_text("Where is my order?")
    answer = await ask(http, "/v1/completions", prompt=ids, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "Where is my order?"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 0)
    counted = await ask(http, "/tokenize", prompt="Where is my order?", return_token_strs=True)
    assert (counted["tokens"], counted["count"]) == (ids, len(ids))
    assert "".join(counted["token_strs"]) == "Where is my order?"
    assert (await ask(http, "/detokenize", tokens=ids))["prompt"] == "Where is my order?"


async def test_the_ids_of_the_tokens_at_the_edges_are_found_by_their_names(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    """As lm-eval's remote tokenizer asks for them."""
    async with http.get("/tokenizer_info") as answer:
        info = await answer.json()
    assert (info["eos_token"], info["model_max_length"]) == ("[EOS]", card.max_context_tokens)
    for role in ("bos_token", "eos_token"):
        name = info[role]
        counted = await ask(http, "/tokenize", prompt=name, add_special_tokens=False, return_token_strs=True)
        assert (counted["tokens"], counted["token_strs"]) == ([card.tokenizer.special_id(name)], [name])
        for text in (f"{name} Where?", info["pad_token"], info["additional_special_tokens"][0]):
            ids = (await ask(http, "/tokenize", prompt=text))["tokens"]
            assert ids == card.tokenizer.encode_text(text)
        ran = await ask(http, "/v1/completions", prompt=name, max_tokens=1)
        assert ran["usage"]["prompt_tokens"] == len(card.tokenizer.encode_text(name)) > 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_echoed_prompt_is_decoded_once_off_the_event_loop(
    http: aiohttp.ClientSession, card: ModelCard, monkeypatch: pytest.MonkeyPatch, stream: bool, n: int
) -> None:
    ids = card.tokenizer.encode_text("Where is my order?") * 200
    prompt = card.tokenizer.decode(ids)
    decodings = note_decodings(card, ids, monkeypatch)
    body = {"prompt": ids, "echo": True, "max_tokens": 1, "n": n, "stream": stream}
    async with http.post("/v1/completions", json=body) as answer:
        text = await answer.text()
    events = events_of(text) if stream else [json.loads(text)]
    choices = [choice for event in events for choice in event["choices"]]
    assert sorted(each["index"] for each in choices if each["text"].startswith(prompt)) == list(range(n))
    assert decodings == [False]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone_ends_at_its_length_whatever_the_engine_said(
    http: aiohttp.ClientSession, cluster: FakeCluster, card: ModelCard, stream: bool, n: int
) -> None:
    script(cluster.model, [card.tokenizer.special_id("<|im_end|>")])  # the one token ends the engine's answer
    body = {"prompt": "Where?", "echo": True, "max_tokens": 0, "n": n, "stream": stream}
    async with http.post("/v1/completions", json=body) as answer:
        text = await answer.text()
    events = events_of(text) if stream else [json.loads(text)]
    choices = [choice for event in events for choice in event["choices"]]
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length"] * n
    assert {each["text"] for each in choices} <= {"Where?", ""}


async def test_ids_beyond_the_context_have_a_text_and_refused_ones_name_their_field(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    (word,) = card.tokenizer.encode_text(" the")
    many = card.max_context_tokens + 1
    assert (await ask(http, "/detokenize", tokens=[word] * many))["prompt"] == " the" * many
    async with http.post("/detokenize", json={"tokens": [card.vocab_size]}) as refused:
        assert (refused.status, (await refused.json())["error"]["param"]) == (400, "tokens")
    async with http.post("/detokenize", json={"tokens": [word], "model": "other"}) as refused:
        assert (refused.status, (await refused.json())["error"]["param"]) == (404, "model")


async def test_offsets_of_log_probabilities_are_those_of_the_text(http: aiohttp.ClientSession) -> None:
    answer = await ask(http, "/v1/completions", prompt="one", logprobs=2, max_tokens=5, seed=3)
    (choice,) = answer["choices"]
    said = choice["logprobs"]
    for token, offset in zip(said["tokens"], said["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_count_whole_characters_without_control_tokens(
    http: aiohttp.ClientSession, cluster: FakeCluster, card: ModelCard, *, echo: bool, stream: bool
) -> None:
    encode, special = card.tokenizer.encode_text, card.tokenizer.special_id
    answer = "日本 🎉 ok"
    tokens = [*encode("日本"), special("<|im_middle|>"), special("</think>"), *encode(" 🎉 ok")]
    script(cluster.model, [*tokens, special("<|im_end|>")])
    body = {"prompt": "é", "logprobs": 0, "temperature": 0, "echo": echo, "stream": stream}
    async with http.post("/v1/completions", json={**body, "max_tokens": 40}) as said:
        text = await said.text()
    choices = [each for e in (events_of(text) if stream else [json.loads(text)]) for each in e["choices"]]
    rows = [each["logprobs"] for each in choices if each["logprobs"]]
    offsets = [offset for each in rows for offset in each["text_offset"]]
    assert "".join([each["text"] for each in choices]) == "é" * echo + answer
    # Three bytes of the first two characters, two hidden tokens, then a space and four bytes of the third.
    expected = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    answered = offsets[len(encode("é")) * echo :]
    assert offsets[: len(offsets) - len(answered)] == [0, 0] * echo
    assert [offset - echo for offset in answered[: len(expected)]] == expected
    assert max(answered) - echo <= len(answer)


async def test_a_stop_token_of_the_client_ends_the_answer_and_is_not_shown(
    http: aiohttp.ClientSession, cluster: FakeCluster, card: ModelCard
) -> None:
    answer = [card.tokenizer.encode_text(letter)[0] for letter in "abcab"]
    script(cluster.model, [*answer, card.tokenizer.special_id("<|im_end|>")])
    said = await ask(http, messages=HI, stop_token_ids=[answer[2]])
    assert said["choices"][0]["message"]["content"] == "ab"
    assert said["choices"][0]["finish_reason"] == "stop"
    assert said["usage"]["completion_tokens"] == 3


async def test_a_stream_that_waits_is_kept_alive_and_fails_with_an_event(
    http: aiohttp.ClientSession, router: RouterServer, cluster: FakeCluster
) -> None:
    """The status is early then, so a failure before the first token is an error event."""
    router._http.generation.keep_alive_s = 0.01
    for worker in cluster.prefills:
        worker.gate.clear()
    body = {"messages": HI, "stream": True, "request_id": "waits"}
    try:
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            await router.manager.abort("default", "waits")
            rest = (await answer.read()).replace(b": keep-alive\n\n", b"")
    finally:
        for worker in cluster.prefills:
            worker.gate.set()
    (event,) = [line for line in rest.split(b"\n\n") if line]
    assert json.loads(event.removeprefix(b"data: "))["error"]["type"]


async def test_a_header_names_the_ignored_fields_and_a_counter_counts_them(
    http: aiohttp.ClientSession, router: RouterServer
) -> None:
    async with http.post("/v1/chat/completions", json={"messages": HI, "foo": 1, "store": True}) as answer:
        assert answer.headers["x-slipstream-ignored"] == "foo,store"
    assert router.counters.snapshot()["slipstream_ignored_fields_total"] == 2


async def test_grpc_answers_carry_the_index_of_their_choice(
    http: aiohttp.ClientSession, router: RouterServer
) -> None:
    whole = await ask(http, messages=HI, seed=5, n=2)
    request = router_pb2.GenerateRequest(n=2)
    message = request.chat.messages.add(role=router_pb2.MESSAGE_ROLE_USER)
    message.content.add(text=HI[0]["content"])
    request.sampling.seed = 5
    texts, finished = ["", ""], set()
    async with dial(router.host.endpoint) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        async for response in stub.Generate(request, timeout=60):
            for event in response.events:
                if event.HasField("delta"):
                    texts[event.delta.index] += event.delta.text
                elif event.HasField("finished"):
                    finished.add(event.finished.index)
        encoded = await stub.Tokenize(router_pb2.TokenizeRequest(request=request))
        decoded = await stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=encoded.token_ids))
    assert finished == {0, 1}
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert len(encoded.token_ids) == whole["usage"]["prompt_tokens"]
    assert HI[0]["content"] in decoded.text


@pytest.mark.parametrize("n_begun", [0, 1])
@pytest.mark.parametrize("face", ["http", "grpc"])
async def test_only_the_refusal_of_a_request_is_timed_as_one(
    http: aiohttp.ClientSession,
    router: RouterServer,
    monkeypatch: pytest.MonkeyPatch,
    n_begun: int,
    face: str,
) -> None:
    """A choice that finds no place after another's first token fails a request that has run."""
    begin, began, observed = router.manager.begin, 0, []

    async def refuse(*given: Any, **named: Any) -> Any:
        nonlocal began
        if began == n_begun:
            raise errors.Overloaded("full", retry_after_ms=1)
        began += 1
        return await begin(*given, **named)

    monkeypatch.setattr(router.manager, "begin", refuse)
    monkeypatch.setattr(Counters, "observe", lambda _, name, *values, **more: observed.append(name))
    if face == "http":
        async with http.post("/v1/chat/completions", json={"messages": HI, "n": 2}) as answer:
            assert answer.status == 429
    else:
        request = router_pb2.GenerateRequest(n=2)
        request.chat.messages.add(role=router_pb2.MESSAGE_ROLE_USER).content.add(text="hi")
        async with dial(router.host.endpoint) as channel:
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(request, timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                _ = [response async for response in call]
            assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "x-request-id" in dict(failed.value.trailing_metadata() or ())
    await eventually(lambda: not router.manager.held)
    assert observed.count("slipstream_refusal_seconds") == (0 if n_begun else 1)
