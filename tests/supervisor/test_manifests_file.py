"""`slipstream up --config` with the files that the manifests mount: what of them a local cluster takes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.common.cluster.worker_record import Role
from libs.common.runtime.loading import load_settings
from libs.common.runtime.settings import Row, rows
from slipstream.cli.app import app
from slipstream.cluster_record import secret_file
from slipstream.errors import InvalidArgument
from slipstream.rpc.cluster_secret import ClusterSecret
from supervisor.cluster import ClusterSupervisor
from supervisor.commands.up import with_file
from supervisor.configuration.cluster_file import SETTINGS
from supervisor.configuration.cluster_options import DEFAULT_DRAFT_MODEL, DEFAULT_MODEL, ROOT
from supervisor.configuration.plan import ClusterConfig, plan_services
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.network.ports import OwnPorts

BASE = ROOT / "deploy" / "k8s" / "base" / "config"
MODEL_FLAGS = ("--model", str(DEFAULT_MODEL))


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The directory that the pods of overlay local-cpu mount."""
    mounted = tmp_path / "config"
    shutil.copytree(BASE, mounted)
    shutil.copy(ROOT / "deploy" / "k8s" / "overlays" / "local-cpu" / "60-local.toml", mounted)
    return mounted


def up(path: Path, *flags: str) -> Any:
    run_dir = path.parent / "run"
    return CliRunner().invoke(app, ["up", "--run-dir", str(run_dir), "--config", str(path), *flags])


def settings_of(config: ClusterConfig) -> dict[str, Any]:
    """What each planned process would run with."""
    ClusterSecret.keep_in(secret_file(config.run_dir))
    plans = plan_services(config, etcd="127.0.0.1:1", ports=list(range(21_000, 21_040)))
    return {
        plan.instance: load_settings(
            SETTINGS[Role(plan.role)],
            section=plan.role,
            program="p",
            description="",
            arguments=plan.command[3:],
            environment=plan.env,
        )
        for plan in plans
    }


def test_the_manifests_files_are_a_local_cluster(mounted: Path, started: list[ClusterConfig]) -> None:
    done = up(mounted, *MODEL_FLAGS)
    assert done.exit_code == 0, done.exception
    assert "slipstream-etcd:2379, is not dialled" in done.stderr
    (config,) = started
    assert (config.etcd, config.log_format) == (None, "json")
    assert (config.model, config.draft_model) == (DEFAULT_MODEL, DEFAULT_DRAFT_MODEL)
    settings = settings_of(config)
    assert len(settings) == 6
    for each in settings.values():
        assert (each.etcd, each.run_dir, each.log_format) == ("127.0.0.1:1", config.run_dir, "json")
        assert each.cluster_secret_file == secret_file(config.run_dir)
    assert settings["decode-0"].threads == 1 and settings["decode-0"].kv_memory_bytes == 268_435_456
    assert settings["prefill-1"].draft_model == DEFAULT_DRAFT_MODEL


def test_a_head_of_the_files_model_is_not_that_of_another(
    mounted: Path, tmp_path: Path, started: list[ClusterConfig]
) -> None:
    other, head = tmp_path / "other", tmp_path / "head"
    for folder in (other, head):
        folder.mkdir()
    assert up(mounted, "--model", str(other)).exit_code == 0
    settings = settings_of(started[-1])
    assert (settings["decode-0"].model, settings["decode-0"].draft_model) == (other, None)
    assert up(mounted, "--model", str(other), "--draft-model", str(head)).exit_code == 0
    assert settings_of(started[-1])["decode-0"].draft_model == head
    mounted.joinpath("20-model.toml").write_text(f'[common]\ndraft_model = "{head}"\n')
    assert up(mounted, "--model", str(other)).exit_code == 0
    assert settings_of(started[-1])["decode-0"].draft_model == head, "the file has no other model"


def test_a_model_of_another_place_names_the_flag(mounted: Path, started: list[ClusterConfig]) -> None:
    done = up(mounted)
    assert isinstance(done.exception, InvalidArgument) and not started
    missing = "[common] model: /models/slipstream-mini cannot be read: No such file or directory"
    assert done.exception.message == f"--config: {mounted}: {missing}; --model names another"


def test_access_to_an_etcd_of_the_file_goes_with_a_named_one(
    mounted: Path, started: list[ClusterConfig]
) -> None:
    """The file of component tls: certificates for etcd, and for the services."""
    pems = ROOT / "tests" / "support" / "tls"
    text = (ROOT / "deploy" / "k8s" / "components" / "tls" / "50-tls.toml").read_text()
    mounted.joinpath("50-tls.toml").write_text(text)
    done = up(mounted, *MODEL_FLAGS)
    assert isinstance(done.exception, InvalidArgument)
    assert done.exception.message.endswith("; --tls-ca names another"), "TLS is not left out in silence"
    tls = [
        "--tls-ca",
        pems / "ca.pem",
        "--tls-certificate",
        pems / "peer.pem",
        "--tls-key",
        pems / "peer.key",
    ]
    flags = [*MODEL_FLAGS, *map(str, tls)]
    done = up(mounted, *flags)
    assert done.exit_code == 0, done.exception
    for each in settings_of(started[-1]).values():
        assert (each.etcd_ca, each.etcd_certificate, each.etcd_key) == (None, None, None)
        assert each.tls_certificate == pems / "peer.pem"
    done = up(mounted, *flags, "--etcd", "127.0.0.1:2379")
    assert isinstance(done.exception, InvalidArgument)
    assert done.exception.message.endswith("; --etcd-ca names another")


@pytest.mark.parametrize("role", list(SETTINGS))
def test_every_path_of_the_file_that_is_checked_has_a_flag_of_up(role: Role) -> None:
    """The refusal of a path names that flag."""

    def is_checked(row: Row) -> bool:
        return row.type is Path and row.described.check is not None and not row.described.is_hidden

    checked = {row.flag for row in rows(SETTINGS[role]).values() if is_checked(row)}
    flags = re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["up", "--help"]).output)
    assert checked - {"--cluster-secret-file", "--disk"} <= set(flags)


async def test_the_manifests_files_start_a_cluster(mounted: Path, tmp_path: Path) -> None:
    """With fake engines, and real services that read the files."""
    given = fake_engine_config(
        tmp_path / "run",
        model=DEFAULT_MODEL,
        prefill=1,
        decode=1,
        drafters=0,
        modules={role: f"services.{role}" for role in Role},
        ready_timeout_s=300,
        grace_s=100,
    )
    config = with_file(given, mounted, {"model", "drafters", "transport"})
    async with ClusterSupervisor(config, say=print, rng=OwnPorts()) as cluster:
        ready = [process.role for process in cluster.record().processes if process.state == "ready"]
    assert sorted(ready) == ["decode", "etcd", "kvstore", "prefill", "router"]
