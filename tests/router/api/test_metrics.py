"""The series that a router has before anything happens."""

from __future__ import annotations

from libs.common.telemetry.counters import Counters
from services.router.api.metrics import begin_series


def test_series_that_alerts_watch_begin_at_0() -> None:
    counters = Counters()
    begin_series(counters)
    values = counters.snapshot()
    states = ("succeeded", "failed", "cancelled", "expired")
    begun = [
        *[f'slipstream_jobs_ended_total{{state="{state}"}}' for state in states],
        *[f'slipstream_webhooks_total{{outcome="{o}"}}' for o in ("delivered", "failed", "given_up")],
        'slipstream_requests_finished_total{finish_reason="stop"}',
    ]
    assert {name: values.get(name) for name in begun} == dict.fromkeys(begun, 0)
    assert not any(values.values())
    assert not any("queued" in name or "running" in name for name in values)
