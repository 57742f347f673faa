"""A conversation through both APIs of a real cluster: usage, caches, tools, the openai client."""

from __future__ import annotations

import itertools
import json
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.demo.script import SYSTEM_PROMPT, TOOLS, TURNS, run_tool
from libs.common.telemetry.metric_tables.table import SERVICES, metrics_of
from libs.text.tokenizer import Tokenizer
from slipstream.replies import Reply
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from tests.support.clusters.local_cluster import LocalCluster, until

PIN = "x-slipstream-prefill"
OPENING = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": TURNS[0].user}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 96}


def _ask(cluster: LocalCluster, messages: list[dict[str, Any]], session: str, **headers: str) -> Reply:
    reply: Reply = cluster.client.chat(messages, tools=TOOLS, session=session, headers=headers, **GREEDY)
    return reply


def _openai_client(cluster: LocalCluster) -> Any:
    """An openai.OpenAI; typed as Any, because its types want classes where these tests have JSON."""
    import openai  # takes a second

    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0)


def test_the_cluster_is_small(cluster: LocalCluster) -> None:
    assert cluster.supervisor.ready_s is not None
    assert 0 < cluster.supervisor.rss_bytes() < 6e9


def test_the_agent_calls_tools_with_copied_values_and_states_their_results(cluster: LocalCluster) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for turn in TURNS:
        messages.append({"role": "user", "content": turn.user})
        reply = _ask(cluster, messages, "agent")
        messages.append(reply.as_message())
        if turn.tool is not None:
            assert reply.finish_reason == "tool_calls"
            (call,) = reply.tool_calls
            assert (call.name, json.loads(call.arguments)) == (turn.tool, dict(turn.arguments))
            result = run_tool(call.name, json.loads(call.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            reply = _ask(cluster, messages, "agent")
            messages.append(reply.as_message())
        assert reply.finish_reason == "stop"
        assert [value for value in turn.states if value not in reply.text] == []


def test_another_prefill_worker_finds_the_prefix_in_the_kvstore(cluster: LocalCluster) -> None:
    """A worker does not wait for a slow kvstore, so the test tries several prompts."""
    guests = itertools.count()

    def found() -> bool:
        # A new prompt: of the prompts of other tests a worker can only hold the tools at the beginning.
        session = f"guests of test {next(guests)}"
        opening = [
            {"role": "system", "content": f"You serve the {session}. {SYSTEM_PROMPT}"},
            OPENING[1],
        ]
        first, second = (_moved(cluster, opening, session, name) for name in ("prefill-0", "prefill-1"))
        assert second.as_message() == first.as_message()
        assert first.usage is not None
        assert second.usage is not None
        tiers = second.usage.cached_by_tier
        assert sum(tiers.values()) == second.usage.cached_tokens
        full_blocks = (first.usage.prompt_tokens - 1) // 64
        assert second.usage.cached_tokens <= full_blocks * 64
        all_of_it = second.usage.cached_tokens == full_blocks * 64
        return all_of_it and tiers.get("dram", 0) + tiers.get("nvme", 0) >= 64

    until(found, what="the whole prefix comes from the kvstore")


def _moved(cluster: LocalCluster, messages: list[dict[str, Any]], session: str, worker: str) -> Reply:
    """Run a request at that worker, and wait until its blocks are stored and released."""
    reply = _ask(cluster, messages, session, **{PIN: worker})
    cluster.assert_idle()
    assert reply.stats is not None
    assert reply.stats.prefill_worker == worker
    assert reply.stats.kv_bytes_pulled > 0
    return reply


def test_cached_tokens_agree_on_both_apis_streaming_and_not(cluster: LocalCluster) -> None:
    warm = _ask(cluster, OPENING, "usage", **{PIN: "prefill-0"})
    cluster.assert_idle()
    again = _ask(cluster, OPENING, "usage", **{PIN: "prefill-0"})
    assert warm.usage is not None
    assert again.usage is not None
    client = _openai_client(cluster)
    arguments: dict[str, Any] = {
        "model": cluster.client.models()[0],
        "messages": OPENING,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 96,
        "extra_headers": {"x-session-affinity": "usage", PIN: "prefill-0"},
    }
    whole = client.chat.completions.create(**arguments)
    *_, last = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **arguments
    )
    for usage in (whole.usage, last.usage):
        assert usage.prompt_tokens == again.usage.prompt_tokens
        assert usage.completion_tokens == again.usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens == again.usage.cached_tokens > 0
    assert whole.choices[0].message.tool_calls[0].function.name == again.tool_calls[0].name


def test_a_streamed_reply_is_the_whole_reply(cluster: LocalCluster) -> None:
    client = _openai_client(cluster)
    arguments: dict[str, Any] = {
        "model": cluster.client.models()[0],
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **arguments)
    pieces = list(client.chat.completions.create(stream=True, **arguments))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    tokens = whole.choices[0].logprobs.content
    assert "".join(token.token for token in tokens if not token.token.startswith("<|")) == text
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


def test_seeded_sampling_repeats_and_other_seeds_differ(cluster: LocalCluster) -> None:
    def draw(seed: int) -> str:
        reply = cluster.client.complete("Once", temperature=1.5, seed=seed, max_tokens=24, ignore_eos=True)
        return reply.text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_a_partial_message_is_continued_as_the_whole_answer(cluster: LocalCluster) -> None:
    tokenizer = Tokenizer.from_dir(DEFAULT_MODEL)
    whole = cluster.client.chat(OPENING, **GREEDY)
    ids = tokenizer.encode_text(whole.text)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(ids) + 1  # the model writes the text as the tokenizer does
    assert len(ids) > 8
    for n in (1, len(ids) // 2, len(ids) - 1):
        begun = tokenizer.decode(ids[:n])
        assert tokenizer.encode_text(begun) == ids[:n]
        partial = {"role": "assistant", "content": begun, "partial": True}
        rest = cluster.client.chat([*OPENING, partial], **GREEDY)
        assert begun + rest.text == whole.text
        assert rest.usage is not None
        assert rest.usage.completion_tokens == len(ids) + 1 - n
        assert rest.finish_reason == whole.finish_reason == "stop"


def test_a_stop_string_ends_the_reply_before_it(cluster: LocalCluster) -> None:
    base = cluster.client.chat([{"role": "user", "content": "Hello!"}], **GREEDY)
    cut = base.text[len(base.text) // 2 :][:4]
    reply = cluster.client.chat([{"role": "user", "content": "Hello!"}], stop=[cut], **GREEDY)
    assert reply.finish_reason == "stop"
    assert reply.text == base.text[: base.text.index(cut)]


def test_health_models_and_metrics_answer(cluster: LocalCluster) -> None:
    def get(path: str) -> str:
        host = cluster.http if path.startswith("/v1/") else cluster.admin_http
        with urllib.request.urlopen(f"http://{host}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    get("/healthz")
    assert json.loads(get("/v1/models"))["data"][0]["id"] == "slipstream-mini"
    assert "slipstream_requests_total " in get("/metrics")


def test_every_process_has_its_own_metrics_and_health(cluster: LocalCluster) -> None:
    cluster.client.chat([{"role": "user", "content": "Hello!"}], **GREEDY)
    processes = [one for one in cluster.supervisor.record().processes if one.role in SERVICES]
    assert {process.role for process in processes} == set(SERVICES)
    steps = 0.0
    for process in processes:
        host = f"http://{process.admin_http}"
        with urllib.request.urlopen(f"{host}/healthz/ready", timeout=60) as answer:
            assert json.loads(answer.read())["status"] == "ready", process.instance
        with urllib.request.urlopen(f"{host}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        own = {metric.name.removesuffix("_total") for metric in metrics_of(process.role)}
        families = {family.name: family for family in text_string_to_metric_families(text)}
        others = {name for name in families if not name.startswith(("process_", "vllm:"))} - own
        assert not others, process.instance
        assert ("vllm:num_requests_running" in families) == (process.role in ("router", "prefill", "decode"))
        if process.role == "decode":
            samples = families["slipstream_decode_step_seconds"].samples
            steps += sum(sample.value for sample in samples if sample.name.endswith("_count"))
    assert steps > 0


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_required_and_named_tools_are_called(cluster: LocalCluster, api: str) -> None:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": TURNS[0].user}]
    choice = {"type": "function", "function": {"name": "get_invoice"}}
    if api == "grpc":
        reply = cluster.client.chat(messages, tools=TOOLS, tool_choice=choice, **GREEDY)
        assert reply.tool_calls[0].name == "get_invoice"
        return
    client = _openai_client(cluster)
    answer = client.chat.completions.create(
        model="slipstream-mini", messages=messages, tools=TOOLS, tool_choice="required", **GREEDY
    )
    assert answer.choices[0].message.tool_calls


def test_the_openai_client_holds_the_whole_conversation(cluster: LocalCluster) -> None:
    """Streamed calls, tool results, answers, and usage: later turns find their KV."""
    client = _openai_client(cluster)
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for number, turn in enumerate(TURNS):
        messages.append({"role": "user", "content": turn.user})
        reply, usage = _stream_openai(client, messages)
        for call in reply.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            assert (call["function"]["name"], arguments) == (turn.tool, dict(turn.arguments))
            result = run_tool(turn.tool or "", arguments)
            messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": result}]
            reply, usage = _stream_openai(client, messages)
        messages.append(reply)
        assert [value for value in turn.states if value not in reply["content"]] == []
        assert number == 0 or usage.prompt_tokens_details.cached_tokens > 0


def _stream_openai(client: Any, messages: list[Any]) -> tuple[dict[str, Any], Any]:
    """The assistant message, joined from its chunks, and the usage."""
    chunks = client.chat.completions.create(
        model="slipstream-mini",
        messages=messages,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-session-affinity": "openai"},
        **GREEDY,
    )
    text, usage = "", None
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.id or ""
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls.values()
        ]
    return message, usage
