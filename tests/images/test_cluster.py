"""Containers of all tiers, restricted as pods are: a conversation, and the end of each by SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

from bench.demo.script import SYSTEM_PROMPT, TOOLS, TURNS, run_tool
from bench.images.cluster import ContainerCluster
from bench.ledgers import block_counts, wait_until_idle
from slipstream.operator_access import operator_dial
from slipstream.replies import Reply

pytestmark = [pytest.mark.images, pytest.mark.timeout(3600)]

END_S = 60.0
GREEDY: dict[str, Any] = {"temperature": 0.0, "timeout_s": 120.0}


def ask(cluster: ContainerCluster, messages: list[dict[str, Any]]) -> Reply:
    reply: Reply = cluster.client.chat(messages, tools=TOOLS, session="images", max_tokens=160, **GREEDY)
    messages.append(reply.as_message())
    return reply


def hold_conversation(cluster: ContainerCluster) -> list[Reply]:
    """The demo's first two turns: each calls a tool and states what the tool answered."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
    replies = []
    for turn in TURNS[:2]:
        messages.append({"role": "user", "content": turn.user})
        called = ask(cluster, messages)
        (call,) = called.tool_calls
        assert call.name == turn.tool
        content = run_tool(call.name, turn.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        answer = ask(cluster, messages)
        assert all(stated in answer.text for stated in turn.states), answer.text
        replies += [called, answer]
    return replies


def wait_drafted(cluster: ContainerCluster) -> None:
    """Return when an answer has tokens of the drafter. On crowded cores its drafts come too late for some."""
    question = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": TURNS[0].user}]
    deadline_s = time.monotonic() + END_S
    while True:
        reply: Reply = cluster.client.chat(question, tools=TOOLS, max_tokens=160, **GREEDY)
        if reply.stats is not None and reply.stats.accepted_drafts > 0:
            return
        assert time.monotonic() < deadline_s, reply.stats


async def until_stored_and_idle(cluster: ContainerCluster) -> None:
    """The kvstore has blocks of the conversation, and no worker holds anything for it."""
    dial = operator_dial(given=cluster.secret_file)
    async with asyncio.timeout(END_S):
        while not (await block_counts({"kvstore-0": cluster.endpoint("kvstore")}, dial))["dram"]:
            await asyncio.sleep(0.1)
    problems: list[str] = []
    workers = {tier: cluster.endpoint(tier) for tier in ("prefill", "decode", "drafter", "kvstore")}
    assert await wait_until_idle(workers, problems, dial, timeout_s=END_S) == 0
    assert problems == []


def test_a_conversation_runs_and_every_container_ends_in_order(containers: ContainerCluster) -> None:
    replies = hold_conversation(containers)
    stats = [reply.stats for reply in replies if reply.stats is not None]
    # A turn whose prefix the decode worker holds may be computed there, as the measured rates say.
    assert stats[0].prefill_worker == "prefill-0", stats[0].reason
    assert {found.prefill_worker for found in stats[1:]} <= {"prefill-0", ""}
    assert {found.decode_worker for found in stats} == {"decode-0"}
    assert sum(found.kv_bytes_pulled for found in stats) > 0
    usage = replies[-1].usage
    assert usage is not None and usage.cached_tokens > 0
    wait_drafted(containers)
    asyncio.run(until_stored_and_idle(containers))
    for tier in ("router", "decode", "prefill", "drafter", "kvstore"):
        containers.containers[tier].kill("TERM")
        log = containers.containers[tier].log
        assert containers.containers[tier].wait(END_S) == 0, f"{tier}: {log.read_text()[-2000:]}"


def test_the_second_sigterm_ends_a_router_that_drains(containers: ContainerCluster) -> None:
    router = containers.containers["router"]
    stream = containers.client.stream_complete(
        "Where is my order? " * 20, max_tokens=800, ignore_eos=True, **GREEDY
    )
    next(iter(stream))
    containers.containers["decode"].kill("STOP")  # so the answer cannot end, and the router keeps draining
    router.kill("TERM")
    deadline_s = time.monotonic() + END_S
    while "router-0 stops" not in router.log.read_text():
        assert router.runs and time.monotonic() < deadline_s, router.log.read_text()
        time.sleep(0.05)
    router.kill("TERM")
    assert router.wait(END_S) == 128 + signal.SIGTERM
    stream.close()
