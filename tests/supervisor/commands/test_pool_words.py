"""What the commands of the local cluster say of the pool that KV stores share."""

from __future__ import annotations

from typer.testing import CliRunner

from slipstream.cli.app import app
from supervisor.commands.status import _state


def test_status_says_that_the_pool_is_unavailable() -> None:
    def state(counters: dict[str, float]) -> str:
        return _state(
            {
                "has_worker_service": True,
                "state": "ready",
                "status": {"draining": False, "counters": counters},
            }
        )

    assert state({"slipstream_kvstore_pool_unavailable": 1.0}) == "ready, pool unavailable"
    assert state({"slipstream_kvstore_pool_unavailable": 0.0}) == state({}) == "ready"


def test_the_number_of_masters_has_a_flag_of_its_own() -> None:
    refused = CliRunner().invoke(app, ["up", "--pool-master", "2"])
    assert refused.exit_code == 2
    helped = CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "200"})
    assert "--pool-masters" in helped.output
