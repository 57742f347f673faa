"""Jobs outlive the processes that run them."""

from __future__ import annotations

import os
import signal
from typing import Any

from slipstream.jobs.messages import JobOptions, SubmittedJob
from tests.support.clusters.disturbance import DECODERS
from tests.support.clusters.local_cluster import LocalCluster, until

BODIES: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"Question {number}"}],
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 0,
    }
    for number in range(30)
]
# The first jobs may end before the faults. The others are held at this token.
N_FREE, HELD_FROM = 10, 40


def test_jobs_outlive_a_router_and_a_decode_worker(fakes: LocalCluster) -> None:
    calm = fakes.client.jobs.submit(BODIES, options=JobOptions(group_id="calm"))
    expected = _answers(fakes, calm)
    group = JobOptions(group_id="disturbed")
    jobs = fakes.client.jobs.submit(BODIES[:N_FREE], options=group)
    until(lambda: _succeeded(fakes) >= N_FREE // 2, what="jobs that have ended")
    with fakes.gate.held(*DECODERS, from_token=HELD_FROM):
        jobs += fakes.client.jobs.submit(BODIES[N_FREE:], options=group)
        for instance, at in (("decode-0", ("decode-0",)), ("router-1", DECODERS)):
            until(lambda at=at: any(map(fakes.sequences, at)), what=f"jobs at {at}")  # type: ignore[misc]
            pid = fakes.pid(instance)
            assert _succeeded(fakes) <= N_FREE, "the jobs have ended too soon"
            os.kill(pid, signal.SIGKILL)
            fakes.until_running(instance, but=pid)
    assert _answers(fakes, jobs) == expected
    assert len({job.id for job in fakes.client.jobs.list_jobs(group_id="disturbed")}) == len(BODIES)


def _answers(cluster: LocalCluster, jobs: list[SubmittedJob]) -> list[Any]:
    for _ in cluster.client.jobs.follow_group(jobs[0].group_id):
        pass
    found = [cluster.client.jobs.get(job.id) for job in jobs]
    assert {each.job.state for each in found} == {"succeeded"}
    return [each.answer["choices"] for each in found]


def _succeeded(cluster: LocalCluster) -> int:
    return next(iter(cluster.client.jobs.follow_group("disturbed"))).succeeded
