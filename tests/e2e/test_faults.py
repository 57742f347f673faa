"""Losing a part makes the cluster slower, never wrong."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from bench.demo_script import SYSTEM_PROMPT, TOOLS, TURNS
from slipstream.replies import Reply
from tests.support.local_cluster import LocalCluster, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
MESSAGES = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": TURNS[1].user}]
# A running generation must not notice this long a silence of etcd.
ETCD_AWAY_S = 30.0


def test_a_killed_drafter_changes_nothing_but_speed(cluster: LocalCluster) -> None:
    replies: list[Reply] = []

    def drafted() -> bool:
        """Decode waits for drafts within its budget only, so a single answer may have none."""
        replies.append(cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY))
        return replies[-1].trail is not None and replies[-1].trail.accepted_drafts > 0

    until(drafted, timeout_s=60, what="an answer with drafts")
    cluster.call(cluster.supervisor.hold("drafter-0"))
    try:
        without = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    finally:
        cluster.call(cluster.supervisor.release("drafter-0"), timeout_s=60)
    assert without.trail is not None
    assert without.trail.accepted_drafts == 0
    assert {str(reply.as_message()) for reply in replies} == {str(without.as_message())}


def test_a_killed_kvstore_is_a_miss(cluster: LocalCluster) -> None:
    before = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    cluster.call(cluster.supervisor.hold("kvstore-0"))
    try:
        during = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    finally:
        cluster.call(cluster.supervisor.release("kvstore-0"), timeout_s=60)
    assert during.as_message() == before.as_message()
    after = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    assert after.as_message() == before.as_message()


def test_a_stream_outlives_its_decode_worker(cluster: LocalCluster) -> None:
    arguments = {**GREEDY, "max_tokens": 600}
    undisturbed = cluster.client.chat(MESSAGES, tools=TOOLS, **arguments)
    stream = cluster.client.stream_chat(MESSAGES, tools=TOOLS, session="dies", **arguments)
    events = iter(stream)
    for _ in range(3):
        next(events)
    running = [n for n in ("decode-0", "decode-1") if cluster.status(n).ledger.sequences]
    assert len(running) == 1
    os.kill(cluster.pid(running[0]), signal.SIGKILL)
    for _ in events:
        pass
    assert stream.reply.as_message() == undisturbed.as_message()
    assert stream.reply.trail is not None
    assert stream.reply.trail.attempts == 2
    until(lambda: cluster.supervisor.record().find(running[0]).state == "ready", timeout_s=60, what="restart")


@pytest.mark.timeout(300)
def test_a_running_generation_is_untouched_by_30_s_without_etcd(cluster: LocalCluster) -> None:
    restarts = {process.instance: process.restarts for process in cluster.supervisor.record().processes}
    etcd = cluster.pid("etcd")
    spanning: dict[str, Any] = {"temperature": 0.0, "max_tokens": 7000, "ignore_eos": True}
    stream = cluster.client.stream_chat(MESSAGES, tools=TOOLS, session="spans", timeout_s=250, **spanning)
    events = iter(stream)
    next(events)
    before = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    os.kill(etcd, signal.SIGSTOP)
    try:
        end = time.monotonic() + ETCD_AWAY_S
        while time.monotonic() < end:
            # Placed, run and finished on the last snapshot.
            during = cluster.client.chat(MESSAGES, tools=TOOLS, session="no-etcd", **GREEDY)
            assert during.as_message() == before.as_message()
            next(events, None)
    finally:
        os.kill(etcd, signal.SIGCONT)
    for _ in events:
        pass
    assert stream.reply.finish_reason == "length"
    assert stream.reply.usage is not None
    assert stream.reply.usage.completion_tokens == 7000
    assert stream.reply.trail is not None
    assert stream.reply.trail.attempts == 1
    assert cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY).as_message() == before.as_message()
    after = {process.instance: process.restarts for process in cluster.supervisor.record().processes}
    assert after == restarts
