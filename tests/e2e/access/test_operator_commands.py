"""Commands of an operator by the address of a router, on a cluster with API keys and mutual TLS.

The operator has a key and a certificate of the peers' CA, which alone admits no operator. What runs on other
machines than the cluster has no run directory, no secret and no way to the workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.common.cluster.worker_record import Role
from slipstream.cli.app import app
from slipstream.credentials.api_key_file import KeyScope, add_key
from slipstream.errors import Unauthenticated
from slipstream.operator_access import operator_dial
from slipstream.rpc.tls import TlsFiles
from supervisor.commands.status import show_status
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.tls.authority import Authority


@dataclass(frozen=True)
class Operated:
    """The cluster and its operator."""

    cluster: LocalCluster
    admin: str
    key: str
    tenant_key: str
    tls: TlsFiles

    def run(self, *arguments: str, key: str = "") -> Any:
        flags = ["--router", self.admin, "--api-key", key or self.key, "--run-dir", "/nowhere"]
        files = {"ca": "--tls-ca", "certificate": "--tls-certificate", "key": "--tls-key"}
        flags += [part for name, path in self.tls.paths().items() for part in (files[name], str(path))]
        return CliRunner().invoke(app, [*arguments, *flags])

    def states(self) -> dict[str, str]:
        """The state of each process, as the router shows it."""
        said = self.run("status", "--json")
        assert said.exit_code == 0, said.exception
        return {each["instance"]: each["state"] for each in json.loads(said.output)["processes"]}


@pytest.fixture(scope="module")
def operated(request: pytest.FixtureRequest) -> Iterator[Operated]:
    with lasting_dir(request, "operated") as run_dir:
        authority = Authority(run_dir / "authority")
        tls = authority.issue("cluster")
        keys = run_dir / "keys.toml"
        key = add_key(keys, name="ops-anna", tenant="ops", scope=KeyScope.OPERATOR)
        tenant_key = add_key(keys, name="bert", tenant="bert")
        counts = {"prefill": 1, "decode": 2, "kvstores": 1, "drafters": 0, "routers": 1}
        config = fake_engine_config(run_dir / "run", pace_s=0.0003, **counts)
        extra = {**config.extra_arguments, Role.ROUTER: ["--api-keys", str(keys)]}
        secured = fake_engine_config(run_dir / "run", pace_s=0.0003, **counts, extra_arguments=extra, tls=tls)
        with LocalCluster(secured) as running:
            admin = running.supervisor.record().find("router-0").admin
            assert admin is not None
            yield Operated(running, admin, key, tenant_key, authority.issue("laptop"))


def test_status_top_autoscale_and_kv(operated: Operated) -> None:
    until(lambda: set(operated.states().values()) == {"ready"}, what=lambda: str(operated.states()))
    assert sorted(operated.states()) == ["decode-0", "decode-1", "kvstore-0", "prefill-0", "router-0"]
    top = operated.run("top", "--json")
    assert {tier["tier"]: tier["ready"] for tier in json.loads(top.output)["tiers"]} == {
        "router": 1, "prefill": 1, "decode": 2, "kvstore": 1,
    }  # fmt: skip
    recommended = json.loads(operated.run("autoscale", "--json").output)["tiers"]
    assert next(tier for tier in recommended if tier["role"] == "drafter")["wanted_replicas"] == 0
    listed = operated.run("kv", "ls", "--json")
    assert listed.exit_code == 0, listed.exc_info
    assert [node["node"] for node in json.loads(listed.output)] == ["kvstore-0"]
    assert operated.run("kv", "stat").exit_code == 0
    assert operated.run("kv", "verify", "--node", "kvstore-0").exit_code == 0
    assert operated.run("kv", "drop", "--all").exit_code == 0


def test_status_of_one_process_by_way_of_the_router(operated: Operated) -> None:
    until(lambda: set(operated.states().values()) == {"ready"}, what=lambda: str(operated.states()))
    for name in operated.states():
        said = operated.run("status", name, "--json")
        assert said.exit_code == 0, said.exception
        (row,) = json.loads(said.output)["workers"]
        assert row["status"]["instance"] == name
        assert row["status"]["ledger"]["blocks_leaked"] == "0"
    assert "requests hold nothing" in operated.run("status", "decode-1").output


def test_an_empty_kvstore_node_has_room(operated: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    until(lambda: set(operated.states().values()) == {"ready"}, what=lambda: str(operated.states()))
    assert operated.run("kv", "drop", "--all").exit_code == 0
    fleet = json.loads(operated.run("status", "--json").output)["processes"]
    (store,) = [each for each in fleet if each["instance"] == "kvstore-0"]
    assert int(store["load"]["blocks_free"]) > 100
    run_dir = operated.cluster.run_dir
    capsys.readouterr()
    asyncio.run(show_status(run_dir, as_json=True, dial=operator_dial(run_dir)))
    (shown,) = [
        each for each in json.loads(capsys.readouterr().out)["workers"] if each["instance"] == "kvstore-0"
    ]
    assert shown["status"]["load"]["blocks_free"] == store["load"]["blocks_free"]


def test_drain_undrain_and_restart(operated: Operated) -> None:
    drained = operated.run("drain", "decode-1")
    assert drained.exit_code == 0, drained.exception
    until(lambda: operated.states().get("decode-1") == "draining", what=lambda: str(operated.states()))
    operated.cluster.until_logged("decode-1", "decode-1 is drained by operator ops-anna")
    undrained = operated.run("undrain", "decode-1")
    assert undrained.exit_code == 0, undrained.exception
    until(lambda: operated.states().get("decode-1") == "ready", what=lambda: str(operated.states()))
    before = operated.cluster.pid("decode-0")
    restarted = operated.run("restart", "decode-0", "--timeout-s", "300")
    assert "restarted decode-0" in restarted.output, restarted.exception
    assert operated.cluster.pid("decode-0") != before


def test_a_rolling_restart_replaces_every_process(operated: Operated) -> None:
    until(lambda: set(operated.states().values()) == {"ready"}, what=lambda: str(operated.states()))
    before = {name: operated.cluster.pid(name) for name in operated.states()}
    restarted = operated.run("restart", "--rolling", "--timeout-s", "300")
    assert restarted.exit_code == 0, restarted.exception
    for name, pid in before.items():
        assert f"restarted {name} " in restarted.output
        assert operated.cluster.pid(name) != pid
    wanted = dict.fromkeys(before, "ready")
    until(lambda: operated.states() == wanted, what=lambda: str(operated.states()))


def test_jobs_and_usage_by_the_same_address_and_key(operated: Operated, tmp_path: Path) -> None:
    bodies, answers = tmp_path / "bodies.jsonl", tmp_path / "answers.jsonl"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    bodies.write_text(f"{json.dumps(body)}\n" * 2)
    submit = operated.run("jobs", "submit", str(bodies), "--group", "night", "--output", str(answers))
    assert submit.exit_code == 0, submit.exception
    assert len(answers.read_text().splitlines()) == 2
    listed = json.loads(operated.run("jobs", "ls", "--group", "night", "--json").output)
    assert [job["state"] for job in listed] == ["succeeded", "succeeded"]
    shown = json.loads(operated.run("jobs", "show", listed[0]["id"]).output)
    assert shown["answer"]["choices"][0]["message"]["role"] == "assistant"
    assert operated.run("jobs", "cancel", "--group", "night").output == "0 cancelled\n"
    assert operated.run("usage", "--json").exit_code == 0


def test_a_tenants_key_and_a_certificate_alone_are_refused(operated: Operated) -> None:
    for arguments in (("status",), ("drain", "decode-0"), ("top", "--once"), ("jobs", "ls")):
        refused = operated.run(*arguments, key=operated.tenant_key)
        assert isinstance(refused.exception, Unauthenticated), refused.output
        assert "class operator" in refused.exception.message
    assert operated.states()["decode-0"] == "ready"
