"""The loss of a process makes the cluster slower, never wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import TracebackType
from typing import Any

from bench.demo_script import SYSTEM_PROMPT, TOOLS, TURNS
from slipstream.replies import Reply
from tests.support.clusters.disturbance import DECODERS
from tests.support.clusters.local_cluster import PATIENCE_S, LocalCluster, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
MESSAGES = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": TURNS[1].user}]
# etcd is silent for this long without effect on running generations. On a fast machine several generations
# follow one another in that time.
ETCD_AWAY_S = 30.0
SPANNING_TOKENS = 6000


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
    arguments = {**GREEDY, "max_tokens": 600}
    undisturbed = cluster.client.chat(MESSAGES, tools=TOOLS, **arguments)
    with cluster.gate.held(*DECODERS, from_token=40) as gate:
        stream = cluster.client.stream_chat(MESSAGES, tools=TOOLS, session="dies", **arguments)
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


class LongGenerations:
    """Long generations one after another, so that one always runs; a thread reads them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.begun = 0
        self.tokens = 0  # of all generations
        self._cluster = cluster
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> LongGenerations:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if error is None and self._error is not None:
            raise self._error

    def until_more(self) -> None:
        """Return after some more tokens."""
        seen = self.tokens
        until(lambda: self._error or self.tokens > seen + 20, what="the generation continues")

    def _read(self) -> None:
        try:
            while not self._stopping.is_set():
                self._one()
        except BaseException as error:
            self._error = error

    def _one(self) -> None:
        self.begun += 1
        before, limits = self.tokens, {**GREEDY, "max_tokens": SPANNING_TOKENS}
        stream = self._cluster.client.stream_chat(MESSAGES, tools=TOOLS, timeout_s=1800, **limits)
        for event in stream:
            self.tokens = before + event.completion_tokens
            if self._stopping.is_set():
                stream.close()
                return
        assert stream.reply.finish_reason == "length"
        assert stream.reply.usage is not None
        assert stream.reply.usage.completion_tokens == SPANNING_TOKENS


def test_running_generations_are_untouched_by_30_s_without_etcd(cluster: LocalCluster) -> None:
    restarts = {process.instance: process.restarts for process in cluster.supervisor.record().processes}
    etcd = cluster.pid("etcd")
    begun = cluster.counted("slipstream_attempts_total") - cluster.counted("slipstream_hedges_total")
    with LongGenerations(cluster) as generations:
        before, asked = cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY), 2
        generations.until_more()
        os.kill(etcd, signal.SIGSTOP)
        try:
            end = time.monotonic() + ETCD_AWAY_S
            while time.monotonic() < end:
                # Placed, run and finished on the last snapshot.
                during = cluster.client.chat(MESSAGES, tools=TOOLS, session="no-etcd", **GREEDY)
                assert during.as_message() == before.as_message()
                asked += 1
            generations.until_more()
        finally:
            os.kill(etcd, signal.SIGCONT)
        generations.until_more()
        assert cluster.client.chat(MESSAGES, tools=TOOLS, **GREEDY).as_message() == before.as_message()
    begun = cluster.counted("slipstream_attempts_total") - cluster.counted("slipstream_hedges_total") - begun
    assert begun == asked + generations.begun, "a generation needed another attempt"
    after = {process.instance: process.restarts for process in cluster.supervisor.record().processes}
    assert after == restarts
