"""A cluster of groups whose ranks have separate memories, as those of devices are, here on processors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from supervisor.configuration.cluster_options import WorkerSizes
from supervisor.configuration.plan import ClusterConfig
from tests.e2e.fleet.test_cut_prefixes import EXACT, MAX_TOKENS, expected, restored_from_the_store
from tests.e2e.fleet.test_parallel import ranks
from tests.support.clusters.disturbance import DECODERS, PREFILLERS
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.process_checks import alive

WORKERS = (*PREFILLERS, *DECODERS)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
_KV_BYTES = 32 << 20  # each page is in the ranks' memories and in the copy of the host


@pytest.fixture(
    scope="module",
    params=[
        ("tp=2", "kv=2", "pp=2", "tp=2"),
        pytest.param(("kv=2,pp=2", "tp=2,kv=2", "tp=2,pp=2", "kv=4"), marks=pytest.mark.soak),
    ],
)
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Two prefill and two decode workers, each cut in another way than the next one."""
    cuts = dict(zip(WORKERS, request.param, strict=True))
    with lasting_dir(request, "separate") as run_dir:
        changes = {name: {"separate": True, "early_ranks": True} for name in WORKERS}
        (run_dir / "altered.json").write_text(json.dumps(changes))
        config = ClusterConfig(
            run_dir=run_dir,
            modules=dict.fromkeys(Role, "tests.support.clusters.altered_service"),
            sizes=WorkerSizes(compute_dtype=EXACT, kv_memory_bytes=_KV_BYTES),
            drafters=1,
            drafts="on",
            drafts_from="remote",
            allow_requested_prefill=True,
            instance_arguments={name: ("--parallel", cut) for name, cut in cuts.items()},
        )
        with LocalCluster(config) as running:
            yield running


@pytest.mark.parametrize("worker", WORKERS)
def test_each_worker_is_a_group_of_separate_memories(cluster: LocalCluster, worker: str) -> None:
    assert ranks(cluster.pid(worker))
    cluster.until_logged(worker, "ranks have separate KV pages")


def test_handed_over_answers_with_drafts_equal_those_of_one_process(cluster: LocalCluster) -> None:
    """Each answer begins on one group and goes on another one. Prompts that run at once share a prefix."""
    numbers = iter(range(10_000))
    handovers: set[tuple[str, str]] = set()

    def all_pass() -> bool:
        common = f"Letter {next(numbers)}. " + "Your order of four chairs and a table is on its way. " * 6
        prompts = [common + end for end in ("When does it arrive?", "Who brings it?", "")]
        with ThreadPoolExecutor(len(prompts)) as threads:
            replies = list(threads.map(lambda prompt: cluster.client.complete(prompt, **GREEDY), prompts))
        assert [reply.text for reply in replies] == [expected(prompt) for prompt in prompts]
        stats = [reply.stats for reply in replies if reply.stats is not None]
        handovers.update((s.prefill_worker, s.decode_worker) for s in stats if s.kv_bytes_pulled)
        return len(handovers) > 1 and any(s.accepted_drafts for s in stats)

    until(all_pass, what="accepted drafts, and handovers between several groups")


@pytest.mark.parametrize(("writer", "reader"), [PREFILLERS, PREFILLERS[::-1]])
def test_a_prefix_is_restored_from_the_store_by_another_group(
    cluster: LocalCluster, writer: str, reader: str
) -> None:
    until(lambda: restored_from_the_store(cluster, writer, reader), what="a prefix went through the store")


class Begun:
    """A stream at its third token, and its decode worker with the other ranks. The gate must hold both."""

    def __init__(self, cluster: LocalCluster, prompt: str) -> None:
        self._prompt = prompt
        self._stream = cluster.client.stream_complete(prompt, session=prompt[:16], **GREEDY)
        self._events = iter(self._stream)
        while next(self._events).completion_tokens < 3:
            pass
        (self.worker,) = [name for name in DECODERS if cluster.sequences(name)]
        self.rank_0 = cluster.pid(self.worker)
        self.others = ranks(self.rank_0)

    def check_continued(self) -> None:
        for _ in self._events:
            pass
        reply = self._stream.reply
        assert reply.text == expected(self._prompt)
        assert reply.stats is not None and reply.stats.attempts > 1


def test_a_stream_outlives_a_rank_of_its_worker(cluster: LocalCluster) -> None:
    prompt = "The parcel left the depot on Monday, and it is not here yet. " * 9
    with cluster.gate.held(*DECODERS, from_token=10) as gate:
        begun = Begun(cluster, prompt)
        os.kill(begun.others[-1], signal.SIGKILL)
        until(lambda: not any(map(alive, (begun.rank_0, *begun.others))), what="the end of all ranks")
        gate.open()
    begun.check_continued()
    cluster.until_running(begun.worker, but=begun.rank_0)
    cluster.until_logged(begun.worker, "was killed by signal 9: the worker ends with it")
    again = cluster.client.complete(prompt, **GREEDY)
    assert again.text == expected(prompt)


def test_a_worker_whose_step_hangs_stops(cluster: LocalCluster) -> None:
    """A rank that stands still is a step without an end, and a collection without one."""
    with cluster.gate.held(*DECODERS, from_token=10) as gate:
        begun = Begun(cluster, "Where is the table that I paid for on the second of May? " * 9)
        os.kill(begun.others[-1], signal.SIGSTOP)
        try:
            gate.open()
            os.kill(begun.rank_0, signal.SIGTERM)
            until(lambda: not alive(begun.rank_0), what="the end of rank 0 by one SIGTERM")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(begun.others[-1], signal.SIGCONT)
    until(lambda: not any(map(alive, begun.others)), what="the end of all ranks")
    begun.check_continued()
    cluster.until_logged(begun.worker, "while parts of it hang")
    cluster.until_running(begun.worker, but=begun.rank_0)
