"""The queries of our dashboards and rules, and of vLLM's dashboards, on scrapes of a real cluster."""

from __future__ import annotations

import math
import re
import urllib.request

import pytest

from libs.common.telemetry.metric_tables.table import SERVICES
from tests.monitoring.queries import panel_queries, rule_queries, target, unanswered
from tests.support.clusters.local_cluster import LocalCluster
from tests.support.promql.evaluation import evaluate
from tests.support.promql.series import Series
from tests.support.vllm_dashboards import OF_ROUTERS, OF_SPECULATION, promql

INTERVAL_S, N_SCRAPES = 15.0, 5
END_S = (N_SCRAPES - 1) * INTERVAL_S
# What begins with its first event, or with a setting that this cluster does not have.
LATER = {
    "slipstream_certificate_expires_unix_seconds",
    "slipstream_jobs_ended_total",
    "slipstream_kvstore_bytes_pool",
    "slipstream_kvstore_pin_seconds_bucket",
    "slipstream_kvstore_pool_unavailable",
    "slipstream_kvstore_quarantined_bytes_pool",
    "slipstream_spend_limit_used_ratio",
    "slipstream_webhooks_total",
}
RECORDED = "slipstream:"


@pytest.fixture(scope="module")
def series(cluster: LocalCluster) -> Series:
    """Scrapes with a request between two of them, by a clock of the test."""
    found = Series()
    processes = [each for each in cluster.supervisor.record().processes if each.role in SERVICES]
    assert {process.role for process in processes} == set(SERVICES)
    for number in range(N_SCRAPES):
        for process in processes:
            with urllib.request.urlopen(f"http://{process.admin_http}/metrics", timeout=60) as answer:
                text = answer.read().decode()
            found.add_scrape(text, target(process.instance), number * INTERVAL_S)
        question = [{"role": "user", "content": f"How much is invoice {number}?"}]
        cluster.client.chat(question, temperature=0.0, max_tokens=24)
    cluster.assert_idle()
    return found


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards() -> None:
    """Nothing to check: only `series` sends requests, and checks it. A check asks every process."""


@pytest.mark.parametrize("expression", [*panel_queries(), *rule_queries()])
def test_our_queries_read_series_that_real_processes_have(series: Series, expression: str) -> None:
    evaluate(expression, series, END_S)
    missing = {each.name for each in unanswered(re.sub(r" offset \dh", "", expression), series, END_S)}
    assert {name for name in missing if not name.startswith(RECORDED)} <= LATER


@pytest.mark.parametrize("expression", [*OF_ROUTERS, *OF_SPECULATION])
def test_vllms_queries_have_values(series: Series, expression: str) -> None:
    values = evaluate(promql(expression), series, END_S)
    assert values and all(math.isfinite(value) for value in values.values())


def test_drafts_of_a_real_cluster_are_counted(series: Series) -> None:
    """Each accepted token has a position, and no draft accepts more than it proposes."""

    def total(name: str) -> float:
        (value,) = evaluate(f"sum(vllm:spec_decode_num_{name}_total)", series, END_S).values()
        return value

    assert 0 < total("accepted_tokens") <= total("draft_tokens")
    assert total("accepted_tokens_per_pos") == total("accepted_tokens")
    first = 'sum(vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"})'
    (most,) = evaluate(first, series, END_S).values()
    assert 0 < most <= total("drafts")
