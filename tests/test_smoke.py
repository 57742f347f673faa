"""The smallest end-to-end test: etcd and five processes with the fake engine answer one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from supervisor.configuration.plan import ClusterConfig
from tests.support.clusters.local_cluster import LocalCluster

FAKE = ("--engine", "fake")


@pytest.mark.smoke
def test_a_request_travels_through_all_five_services(tmp_path: Path) -> None:
    config = ClusterConfig(
        run_dir=tmp_path / "run",
        prefill=2,
        decode=1,
        drafters=1,
        transport="socket",
        allow_requested_prefill=True,
        extra_arguments=dict.fromkeys((Role.PREFILL, Role.DECODE, Role.DRAFTER), FAKE),
    )
    with LocalCluster(config) as cluster:
        prompt = "Where is my order? " * 30
        options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        first = cluster.client.complete(prompt, headers={"x-slipstream-prefill": "prefill-0"}, **options)
        cluster.assert_idle()
        second = cluster.client.complete(prompt, headers={"x-slipstream-prefill": "prefill-1"}, **options)
        assert first.usage is not None
        assert second.usage is not None
        assert first.text == second.text
        assert first.usage.completion_tokens == second.usage.completion_tokens == 20
        assert (first.usage.cached_tokens, second.usage.cached_tokens > 0) == (0, True)
        cluster.assert_idle()
