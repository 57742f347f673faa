"""etcd is stopped for 30 s, longer than every lease, and the generations that run do not notice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest

from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import PATIENCE_S, LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

SILENT_S = 30.0
# At most 12 tokens a second, so the long generation outlasts the silence on every machine.
DECODE_PACE_S, LONG_TOKENS = 0.08, 1500
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Where is order 11?"}]


@pytest.fixture(scope="module")
def slow(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Two workers of each role whose decode engines are slow, and idle in between."""
    with lasting_dir(request, "slow") as run_dir:
        config = fake_engine_config(run_dir, pace_s=0.0, decode_pace_s=DECODE_PACE_S, drafters=0)
        with LocalCluster(config) as running:
            yield running
            running.assert_idle()


class LongGeneration:
    """A generation that a thread reads while the context is open."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.tokens = 0
        self._cluster = cluster
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> LongGeneration:
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
        """Return after some more tokens. Fails when the generation has ended."""
        seen = self.tokens
        until(lambda: not self._thread.is_alive() or self.tokens > seen + 5, what="the generation continues")
        assert self._thread.is_alive(), f"it ended after {self.tokens} tokens: {self._error}"

    def _read(self) -> None:
        try:
            stream = self._cluster.client.stream_chat(
                ASKED, timeout_s=1800, temperature=0.0, max_tokens=LONG_TOKENS, ignore_eos=True
            )
            for event in stream:
                self.tokens = event.completion_tokens
                if self._stopping.is_set():
                    stream.close()
                    return
        except BaseException as error:
            self._error = error


def test_running_generations_are_untouched_by_30_s_without_etcd(slow: LocalCluster) -> None:
    def ask() -> Any:
        reply = slow.client.chat(ASKED, session="no-etcd", temperature=0.0, max_tokens=12, ignore_eos=True)
        return reply.as_message()

    def attempts() -> float:
        return slow.counted("slipstream_attempts_total") - slow.counted("slipstream_hedges_total")

    restarts = {process.instance: process.restarts for process in slow.supervisor.record().processes}
    etcd, begun, asked = slow.pid("etcd"), attempts(), 2
    with LongGeneration(slow) as generation:
        before = ask()
        generation.until_more()
        os.kill(etcd, signal.SIGSTOP)
        try:
            end = time.monotonic() + SILENT_S
            while time.monotonic() < end:
                assert ask() == before  # placed, run and finished on the last snapshot
                asked += 1
            generation.until_more()
        finally:
            os.kill(etcd, signal.SIGCONT)
        generation.until_more()
        assert ask() == before
    assert attempts() - begun == asked + 1, "a generation needed another attempt"
    after = {process.instance: process.restarts for process in slow.supervisor.record().processes}
    assert after == restarts
