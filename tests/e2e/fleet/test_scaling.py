"""The HPA's formula on the answers of a real router's scaler, before real workers that it starts and drains.

A gate holds the streams, so that the load stands still while the scaler is asked. The HPA's clock is virtual:
its window of five minutes passes between two questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.autoscale.hpa import PERIOD_S, HpaController
from libs.common.cluster.worker_record import Role
from slipstream.cli.app import app
from slipstream.enum_names import ROLES
from slipstream.keda import externalscaler_pb2 as keda
from slipstream.keda import externalscaler_pb2_grpc
from slipstream.operator_access import operator_dial
from slipstream.v1 import autoscale_pb2, autoscale_pb2_grpc
from tests.support.clusters.fake_engines import KV_MEMORY_BYTES, fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

WORKERS = ("decode-0", "decode-1", "decode-2")
PLACES, N_STREAMS = 4, 8  # places of a worker's batch, and streams that want one
TOKENS, HELD_FROM = 160, 30  # of each answer: two whole blocks, and the token at which the gate holds it
WINDOW_S = 300.0
LEAST, MOST = 2, 8
ANSWERED_S = 300.0


class Scaler:
    """The questions that KEDA and operators ask the router."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._run_dir = cluster.run_dir
        self._admin = cluster.supervisor.record().find("router-0").admin or ""

    def total(self) -> float:
        """The metric of the decode tier."""
        reference = keda.ScaledObjectRef(name="any", namespace="any", scalerMetadata={"tier": "decode"})
        asked = keda.GetMetricsRequest(scaledObjectRef=reference, metricName="slipstream-decode-replicas")
        answer = self._call(externalscaler_pb2_grpc.ExternalScalerStub, "GetMetrics", asked)
        return float(answer.metricValues[0].metricValueFloat)

    def recommendations(self) -> autoscale_pb2.GetRecommendationsResponse:
        asked = autoscale_pb2.GetRecommendationsRequest()
        found: autoscale_pb2.GetRecommendationsResponse = self._call(
            autoscale_pb2_grpc.AutoscaleServiceStub, "GetRecommendations", asked
        )
        return found

    def replicas(self) -> int:
        """The decode workers that the router counts."""
        (tier,) = [tier for tier in self.recommendations().tiers if ROLES.name(tier.role) == "decode"]
        return tier.replicas

    def losses(self) -> dict[str, int]:
        """The tokens that the removal of each decode worker loses, the least first."""
        found = self.recommendations().losses
        return {loss.instance: loss.lost_tokens for loss in found if ROLES.name(loss.role) == "decode"}

    def _call(self, stub: Any, method: str, asked: Any) -> Any:
        async def call() -> Any:
            async with operator_dial(self._run_dir)(self._admin) as channel:
                return await getattr(stub(channel), method)(asked, timeout=60)

        return asyncio.run(call())


@pytest.fixture(scope="module")
def scaled(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """One worker of each tier and a router. The other two decode workers are down."""
    counts = {"prefill": 1, "decode": 3, "kvstores": 0, "drafters": 0, "routers": 1}
    decode = ["--engine", "fake", "--kv-memory-bytes", str(KV_MEMORY_BYTES), "--max-batch", str(PLACES)]
    with lasting_dir(request, "scaled") as run_dir:
        config = fake_engine_config(run_dir, pace_s=0.0003, **counts)
        extra = {**config.extra_arguments, Role.DECODE: [*decode, "--fake-pace-s", "0.0003"]}
        with LocalCluster(fake_engine_config(run_dir, **counts, extra_arguments=extra)) as cluster:
            for name in WORKERS[1:]:
                cluster.call(cluster.supervisor.hold(name))
            yield cluster


def test_the_hpa_starts_workers_for_a_load_and_drains_what_loses_least(scaled: LocalCluster) -> None:
    scaler, hpa, now_s = Scaler(scaled), HpaController(least=1, most=MOST, down_window_s=WINDOW_S), 0.0
    until(lambda: scaler.replicas() == 1, what=lambda: f"one decode worker is left, not {scaler.replicas()}")
    assert hpa.step(now_s, replicas=1, total=scaler.total()) == 1, "an idle tier asks for no more"

    with ThreadPoolExecutor(N_STREAMS) as clients, scaled.gate.held(*WORKERS, from_token=HELD_FROM) as gate:
        streams = [clients.submit(_stream, scaled, number) for number in range(N_STREAMS)]
        until(lambda: scaler.total() > 2.0, what=lambda: f"more is wanted than {scaler.total()}")
        now_s += PERIOD_S
        wanted = hpa.step(now_s, replicas=1, total=scaler.total())
        assert wanted == 3, "eight streams at four places and an aim of 0.8"
        for name in WORKERS[1:wanted]:
            scaled.call(scaled.supervisor.release(name))
        until(lambda: scaler.replicas() == wanted, what=lambda: f"{scaler.replicas()} of {wanted} are there")
        until(
            lambda: sum(map(scaled.sequences, WORKERS)) == N_STREAMS,
            what=lambda: f"streams at workers: {[scaled.sequences(name) for name in WORKERS]}",
        )
        fewest = min(WORKERS, key=scaled.sequences)
        until(lambda: 2.0 < scaler.total() <= wanted, what=lambda: f"enough, by {scaler.total()}")
        now_s += PERIOD_S
        assert hpa.step(now_s, replicas=wanted, total=scaler.total()) == wanted, "the new workers suffice"
        gate.open()
        assert [stream.result(ANSWERED_S) for stream in streams] == [TOKENS] * N_STREAMS

    cheapest = _restarted(scaled, scaler, fewest, replicas=wanted)
    _check_fall(scaled, scaler, hpa, now_s, cheapest, replicas=wanted)


def _restarted(cluster: LocalCluster, scaler: Scaler, name: str, *, replicas: int) -> str:
    """The worker, which ended and has nothing to lose. The others have sessions."""
    cluster.assert_idle()
    before = cluster.pid(name)
    cluster.supervisor.kill(name)
    cluster.until_running(name, but=before)
    until(
        lambda: scaler.replicas() == replicas and scaler.losses()[name] == 0,
        what=lambda: f"{name} is back with nothing: {scaler.losses()}",
    )
    losses = scaler.losses()
    assert min(losses[other] for other in WORKERS if other != name) > 0, losses
    return name


def _check_fall(
    cluster: LocalCluster, scaler: Scaler, hpa: HpaController, busy_s: float, cheapest: str, *, replicas: int
) -> None:
    """The load is gone: as many are wanted until the window is over, and then the cheapest one goes."""
    until(lambda: scaler.total() < LEAST, what=lambda: f"an idle tier wants less than {scaler.total()}")
    hpa.least = LEAST
    now_s = busy_s
    while now_s + PERIOD_S < busy_s + WINDOW_S:
        now_s += PERIOD_S
        assert hpa.step(now_s, replicas=replicas, total=scaler.total()) == replicas, now_s - busy_s
    assert hpa.step(busy_s + WINDOW_S, replicas=replicas, total=scaler.total()) == LEAST

    drained = CliRunner().invoke(
        app, ["autoscale", "--drain-one", "decode", "--yes", "--run-dir", str(cluster.run_dir)]
    )
    assert f"{cheapest} is drained" in drained.output, drained.exception
    until(lambda: scaler.replicas() == LEAST, what=lambda: f"{scaler.replicas()} are counted")
    assert hpa.step(busy_s + WINDOW_S + PERIOD_S, replicas=LEAST, total=scaler.total()) == LEAST


def _stream(cluster: LocalCluster, number: int) -> int:
    """The tokens of one answer, in a session that stays at the worker that decodes it."""
    question = [{"role": "user", "content": f"question {number} " * 40}]
    reply = cluster.client.chat(question, session=f"session-{number}", max_tokens=TOKENS, ignore_eos=True)
    assert reply.usage is not None
    return reply.usage.completion_tokens
