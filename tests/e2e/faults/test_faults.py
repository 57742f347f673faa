"""The loss of a process makes the cluster slower, never wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

from bench.demo.script import SYSTEM_PROMPT, TOOLS, TURNS
from slipstream.replies import Reply
from tests.support.clusters.disturbance import DECODERS
from tests.support.clusters.local_cluster import LocalCluster, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
MESSAGES = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": TURNS[1].user}]


def test_a_killed_drafter_changes_nothing_but_speed(cluster: LocalCluster) -> None:
    replies: list[Reply] = []

    def drafted() -> bool:
        """Whether an answer has drafts; a single answer may have none, because decode waits only briefly."""
        replies.append(cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY))
        return replies[-1].stats is not None and replies[-1].stats.accepted_drafts > 0

    until(drafted, what="an answer with drafts")
    cluster.call(cluster.supervisor.hold("drafter-0"))
    try:
        without = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    finally:
        cluster.call(cluster.supervisor.release("drafter-0"))
    assert without.stats is not None
    assert without.stats.accepted_drafts == 0
    assert {str(reply.as_message()) for reply in replies} == {str(without.as_message())}


def test_a_killed_kvstore_is_a_miss(cluster: LocalCluster) -> None:
    before = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    cluster.call(cluster.supervisor.hold("kvstore-0"))
    try:
        during = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    finally:
        cluster.call(cluster.supervisor.release("kvstore-0"))
    assert during.as_message() == before.as_message()
    after = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    assert after.as_message() == before.as_message()


def test_a_stream_outlives_its_decode_worker(cluster: LocalCluster) -> None:
    undisturbed = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY)
    with cluster.gate.held(*DECODERS, from_token=40) as gate:
        stream = cluster.client.stream_chat(MESSAGES, tools=TOOLS, session="dies", **GREEDY)
        events = iter(stream)
        while next(events).completion_tokens < 3:
            pass
        running = [name for name in DECODERS if cluster.sequences(name)]
        assert len(running) == 1
        pid = cluster.pid(running[0])
        os.kill(pid, signal.SIGKILL)
        gate.open()
    for _ in events:
        pass
    assert stream.reply.as_message() == undisturbed.as_message()
    assert stream.reply.stats is not None
    assert stream.reply.stats.attempts > 1
    cluster.until_running(running[0], but=pid)
