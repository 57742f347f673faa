"""Prefill workers lend each other their caches: one reads another's blocks, without a kvstore."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.e2e.kv.placed_chat import TEXT, ask_at, plain_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir


@pytest.fixture(scope="module")
def no_store(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with (
        lasting_dir(request, "lending") as run_dir,
        LocalCluster(plain_config(run_dir, kvstores=0)) as running,
    ):
        yield running


def ask(site: LocalCluster, worker: str, text: str) -> Any:
    """The answer to a prompt computed on the given worker."""
    return ask_at(site, worker, [{"role": "user", "content": text}])


def test_a_worker_reads_what_another_one_computed(no_store: LocalCluster) -> None:
    read: list[int] = []

    def lent() -> bool:
        """Run a prompt on one worker, then on the other; the router may learn of the blocks in between."""
        text = f"Case {len(read)}. {TEXT}"
        first, second = ask(no_store, "prefill-0", text), ask(no_store, "prefill-1", text)
        assert second.as_message() == first.as_message()
        read.append(second.usage.cached_by_tier.get("peer", 0))
        return read[-1] > 64

    until(lent, what="blocks read from the other worker")
    no_store.assert_idle()


def wait_lent(site: LocalCluster, text: str) -> Any:
    """The answer of prefill-1 with prefill-0 as its source."""
    ask(site, "prefill-0", text)
    answers: list[Any] = []

    def lent() -> bool:
        fresh = f"{text} {len(answers)}"
        ask(site, "prefill-0", fresh)
        answers.append(ask(site, "prefill-1", fresh))
        return bool(answers[-1].usage.cached_by_tier.get("peer", 0))

    until(lent, timeout_s=60, what="blocks read from the other worker")
    return answers[-1]


def in_use(site: LocalCluster, worker: str) -> bool:
    """Whether the router places work on the worker; a worker that was stopped is out of use for a while."""
    with grpc.insecure_channel(site.grpc) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        workers = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=60).workers
    return any(found.instance == worker and found.ready for found in workers)


def restores(site: LocalCluster) -> float:
    """The sum of prefill-1's wait budgets for sources in ms, which rises with each source that it asks."""
    return site.status("prefill-1").counters.get("slipstream_kv_restore_bound_seconds_total", 0.0)


def read_from_a_stopped_peer(site: LocalCluster, number: int, *, prompts: int) -> bool:
    """Stop the peer when the router knows its blocks: the reader computes them, with the same answer.

    Returns whether a prompt was sent to the peer before the router marked it as silent."""
    until(lambda: in_use(site, "prefill-0"), what="prefill-0 is in use again")
    texts = [f"Round {number}, case {case}. {TEXT}" for case in range(prompts)]
    expected = [ask(site, "prefill-0", text).as_message() for text in texts]
    wait_lent(site, f"Round {number}: what comes after is known too. {TEXT}")
    asked_before = restores(site)
    os.kill(site.pid("prefill-0"), signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(prompts) as threads:
            answers = list(threads.map(lambda text: ask(site, "prefill-1", text), texts))
    finally:
        os.kill(site.pid("prefill-0"), signal.SIGCONT)
    assert [answer.as_message() for answer in answers] == expected
    site.assert_idle()
    return restores(site) > asked_before


def test_a_peer_that_stops_fails_and_changes_nothing(no_store: LocalCluster) -> None:
    rounds = itertools.count()
    until(
        lambda: read_from_a_stopped_peer(no_store, next(rounds), prompts=2),
        what="a prompt was sent to the peer that had stopped",
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_peer_that_stops_again_and_again_fails_and_changes_nothing(no_store: LocalCluster) -> None:
    sent_there = [read_from_a_stopped_peer(no_store, 100 + number, prompts=8) for number in range(20)]
    assert sum(sent_there) >= 1
