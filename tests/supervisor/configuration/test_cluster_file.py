"""`slipstream up --config`: what the file comes to for the cluster and for each of its processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.common.cluster.worker_record import Role
from libs.common.runtime.loading import load_settings
from slipstream.cli.app import app
from slipstream.errors import InvalidArgument
from slipstream.rpc.tls import TlsFiles
from supervisor.configuration.cluster_file import SETTINGS, ClusterFile
from supervisor.configuration.cluster_options import DEFAULT_DRAFT_MODEL, DEFAULT_MODEL, ROOT
from supervisor.configuration.plan import ClusterConfig, plan_services, ports_needed

EXAMPLE = ROOT / "docs" / "examples" / "cluster.toml"
PEMS = ROOT / "tests" / "support" / "tls"


def up(started: list[ClusterConfig], path: Path, *arguments: str) -> ClusterConfig:
    done = CliRunner().invoke(app, ["up", "--config", str(path), *arguments])
    assert done.exit_code == 0, done.exception
    return started[-1]


def settings_of(config: ClusterConfig) -> dict[str, Any]:
    """What each planned process would run with, as it reads its command line and its file."""
    plans = plan_services(
        config, etcd="127.0.0.1:1", ports=list(range(21_000, 21_000 + ports_needed(config)))
    )
    return {
        plan.instance: load_settings(
            SETTINGS[Role(plan.role)],
            section=plan.role,
            program="p",
            description="",
            arguments=plan.command[3:],
            environment={},
        )
        for plan in plans
    }


def test_the_documented_example_is_a_cluster(
    started: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = up(started, EXAMPLE)
    assert (config.http, config.grpc, config.drain_s) == ("127.0.0.1:8000", "127.0.0.1:7000", 60.0)
    assert (config.prefill, config.decode, config.routers) == (2, 2, 1)
    settings = settings_of(config)
    assert len(settings) == 7
    assert settings["decode-1"].max_batch == 32 and settings["prefill-0"].max_batch == 64
    assert settings["drafter-0"].threads == 1 and settings["decode-0"].threads is None
    assert settings["kvstore-0"].disk_bytes == 1 << 30
    assert settings["kvstore-0"].data_dir == config.run_dir / "data" / "kvstore-0"
    assert settings["router-0"].model.resolve() == DEFAULT_MODEL
    assert settings["drafter-0"].draft_model.resolve() == DEFAULT_DRAFT_MODEL
    assert settings["router-0"].drain_s == 60.0


def test_keys_tls_regions_processes_and_sizes_reach_the_services(
    tmp_path: Path, started: list[ClusterConfig]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch()
    file = tmp_path / "cluster.toml"
    file.write_text(
        f"""
[common]
region = "eu-1"
tls_ca = "{PEMS / "ca.pem"}"
tls_certificate = "{PEMS / "peer.pem"}"
tls_key = "{PEMS / "peer.key"}"
log_format = "json"
[router]
api_keys = "{keys}"
processes = 4
region_ms = "eu-1=0,us-1=80"
[decode]
transport = "socket"
drain_s = 9
[kvstore]
dram_bytes = 2097152
[up]
etcd = "etcd:2379"
kvstore = 2
drafter = 0
grace_s = 3
"""
    )
    config = up(started, file, "--log-format", "text")
    assert config.tls == TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / "peer.key")
    assert (config.api_keys, config.etcd, config.grace_s) == (keys, "etcd:2379", 3.0)
    settings = settings_of(config)
    assert (settings["router-0"].processes, settings["router-0"].api_keys) == (4, keys)
    assert {each.region for name, each in settings.items() if name != "router-0"} == {"eu-1"}
    assert (settings["decode-0"].transport, settings["prefill-0"].transport) == ("socket", "auto")
    assert (settings["decode-0"].drain_s, settings["prefill-0"].drain_s) == (9.0, 5.0)
    plans = plan_services(config, etcd="etcd:2379", ports=list(range(7000, 7040)))
    assert {each.drain_s for each in plans if each.role != Role.ROUTER} == {5.0, 9.0}
    assert all(each.drain_s == settings[each.instance].drain_s for each in plans)
    assert settings["kvstore-1"].dram_bytes == 2 << 20
    assert {each.log_format for each in settings.values()} == {"text"}, "a flag goes before the file"
    assert "drafter-0" not in settings and config.draft_model is None


_TLS_FILES = {"ca": PEMS / "ca.pem", "certificate": PEMS / "peer.pem", "key": PEMS / "peer.key"}


def tls_options(*, by_flags: bool) -> tuple[list[str], list[str]]:
    """Lines of a file and flags, of which one or the other give the certificates."""
    if by_flags:
        return [], [word for name, file in _TLS_FILES.items() for word in (f"--tls-{name}", str(file))]
    return [f'tls_{name} = "{file}"' for name, file in _TLS_FILES.items()], []


@pytest.mark.parametrize("by_flags", [False, True])
def test_the_name_in_the_certificates_comes_from_the_file(
    tmp_path: Path, started: list[ClusterConfig], by_flags: bool
) -> None:
    """`up` dials its services by that name, also where flags give the certificates."""
    lines, flags = tls_options(by_flags=by_flags)
    (tmp_path / "c.toml").write_text("\n".join(["[common]", 'tls_server_name = "peers.internal"', *lines]))
    config = up(started, tmp_path / "c.toml", *flags)
    files = _TLS_FILES["ca"], _TLS_FILES["certificate"], _TLS_FILES["key"]
    assert config.tls == TlsFiles(*files, server_name="peers.internal")
    assert {each.tls_server_name for each in settings_of(config).values()} == {"peers.internal"}


@pytest.mark.parametrize("by_flags", [False, True])
def test_a_flag_gives_the_name_in_the_certificates(
    tmp_path: Path, started: list[ClusterConfig], by_flags: bool
) -> None:
    lines, flags = tls_options(by_flags=by_flags)
    (tmp_path / "c.toml").write_text("\n".join(["[common]", 'tls_server_name = "other.internal"', *lines]))
    config = up(started, tmp_path / "c.toml", "--tls-server-name", "peers.internal", *flags)
    assert config.tls is not None and config.tls.server_name == "peers.internal"
    assert {each.tls_server_name for each in settings_of(config).values()} == {"peers.internal"}


def test_the_tokens_of_a_kv_page_are_the_files(tmp_path: Path, started: list[ClusterConfig]) -> None:
    (tmp_path / "c.toml").write_text("[decode]\nblock_tokens = 32")
    assert up(started, tmp_path / "c.toml").block_tokens == 32


def test_flags_go_before_the_file(started: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = up(
        started, EXAMPLE, "--http", "127.0.0.1:81", "--decode", "1", "--drafts", "off", "--drain-s", "7"
    )
    assert (config.http, config.decode, config.drain_s) == ("127.0.0.1:81", 1, 7.0)
    settings = settings_of(config)
    assert settings["decode-0"].drafts == "off"
    assert (settings["router-0"].drain_s, settings["router-0"].http) == (7.0, "127.0.0.1:81")


@pytest.mark.parametrize(("place", "drafter"), [("remote", None), ("local", "local")])
def test_the_file_says_where_the_draft_head_runs(
    tmp_path: Path, started: list[ClusterConfig], place: str, drafter: str | None
) -> None:
    (tmp_path / "c.toml").write_text(f"[up]\ndrafts_from = '{place}'\n")
    config = up(started, tmp_path / "c.toml")
    assert config.counts()[Role.DRAFTER] == int(place == "remote")
    settings = settings_of(config)
    assert ("drafter-0" in settings) == (place == "remote")
    assert (settings["decode-0"].drafter == "local") == (drafter == "local")
    assert up(started, tmp_path / "c.toml", "--drafts-from", "local").head_place == "local"


@pytest.mark.parametrize(
    ("text", "flags", "sizes"),
    [
        ("[prefill]\nmemory_bytes = 7000000000\n[decode]\nmemory_bytes = 1000000000", (), "1.0 or 7.0"),
        ("[prefill]\nmemory_bytes = 7000000000", ("--decode", "1"), "7.0"),
        ("[prefill]\nmemory_bytes = 1000", ("--memory-bytes", "4000000000"), "4.0"),
    ],
)
def test_memory_that_the_file_gives_to_workers_counts(
    tmp_path: Path,
    started: list[ClusterConfig],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    flags: tuple[str, ...],
    sizes: str,
) -> None:
    monkeypatch.setattr("supervisor.commands.up.memory_limit_bytes", lambda: 8_000_000_000)
    (tmp_path / "c.toml").write_text(text)
    done = CliRunner().invoke(app, ["up", "--config", str(tmp_path / "c.toml"), *flags])
    assert isinstance(done.exception, InvalidArgument) and not started
    assert f"prefill and decode workers of {sizes} GB do not fit in the 8.0 GB" in done.exception.message
    smaller = ("--memory-bytes", "1000000000")
    assert up(started, tmp_path / "c.toml", *smaller).host_memory_bytes() == [1_000_000_000] * 4


@pytest.mark.parametrize(
    ("prefill_bytes", "is_refused"), [(5_900_000_000, False), (6_000_000_000, True), (7_900_000_000, True)]
)
def test_memory_of_one_tier_that_leaves_the_other_nothing_is_refused(
    tmp_path: Path,
    started: list[ClusterConfig],
    monkeypatch: pytest.MonkeyPatch,
    prefill_bytes: int,
    is_refused: bool,
) -> None:
    monkeypatch.setattr("supervisor.commands.up.memory_limit_bytes", lambda: 8_000_000_000)
    (tmp_path / "c.toml").write_text(f"[prefill]\nmemory_bytes = {prefill_bytes}\n")
    done = CliRunner().invoke(app, ["up", "--config", str(tmp_path / "c.toml"), "--prefill", "1"])
    assert bool(started) != is_refused
    if is_refused:
        assert isinstance(done.exception, InvalidArgument) and done.exception.field == "--memory-bytes"
        taken = f"2 prefill and decode workers .* {prefill_bytes / 1e9:.1f} GB of 6.0 GB"
        assert re.search(taken, done.exception.message)


@pytest.mark.parametrize(
    ("text", "flags", "shared"),
    [
        ("", ("--device", "cuda"), "4 prefill and decode workers share cuda:0"),
        (
            "[prefill]\ndevice = 'cuda:3'\n[decode]\ndevice = 'cuda:3'",
            ("--prefill", "1", "--decode", "1"),
            "2 .* share cuda:3",
        ),
        (
            "[prefill]\ndevice = 'cuda'\nmemory_bytes = 1000\n[decode]\ndevice = 'cuda:0'",
            ("--prefill", "1", "--decode", "1"),
            "2 .* share cuda:0",
        ),
        ("[prefill]\ndevice = 'cuda'\n[decode]\ndevice = 'cuda:1'", ("--prefill", "1", "--decode", "1"), ""),
        (
            "[decode]\ndevice = 'cuda'",
            ("--prefill", "1", "--decode", "4", "--memory-bytes", "7000000000"),
            "",
        ),
        ("[decode]\ndevice = 'cuda'", ("--device", "cpu"), ""),
        (
            "[decode]\ndevice = 'cuda'\n[drafter]\ndevice = 'cuda:0'",
            ("--decode", "1", "--drafter", "1"),
            "1 prefill and decode workers and 1 drafters share cuda:0",
        ),
        (
            "[decode]\ndevice = 'cuda'\nmemory_bytes = 1000\n[drafter]\ndevice = 'cuda:0'",
            ("--decode", "1", "--drafter", "1"),
            "",
        ),
        ("[decode]\ndevice = 'cuda'\n[drafter]\ndevice = 'cuda:1'", ("--decode", "1", "--drafter", "1"), ""),
        (
            "[prefill]\ndevice = 'cuda:1'\n[decode]\ndevice = 'cuda'",
            ("--prefill", "1", "--decode", "1", "--drafter", "0", "--decode-parallel", "tp=2"),
            "2 .* share cuda:1, as ranks of --parallel take cuda:0 to cuda:1: state",
        ),
        (
            "[prefill]\ndevice = 'cuda:2'\n[decode]\ndevice = 'cuda'\nparallel = 'tp=2,pp=2'",
            ("--prefill", "1", "--decode", "1", "--drafter", "0"),
            "2 .* share cuda:2, as ranks of --parallel take cuda:0 to cuda:3",
        ),
        (
            "[decode]\ndevice = 'cuda:4'\nparallel = 'tp=2'\n[drafter]\ndevice = 'cuda:5'",
            ("--decode", "1", "--drafter", "1"),
            "1 prefill and decode workers and 1 drafters share cuda:5, as ranks",
        ),
        (
            "",
            ("--device", "cuda:0", "--prefill", "0", "--drafter", "0", "--decode-parallel", "tp=2"),
            "2 .* share cuda:0, as ranks of --parallel take cuda:0 to cuda:1",
        ),
        (
            "[prefill]\ndevice = 'cuda:2'\n[decode]\ndevice = 'cuda'",
            ("--prefill", "1", "--decode", "1", "--drafter", "0", "--decode-parallel", "tp=2"),
            "",
        ),
        (
            "[prefill]\ndevice = 'cuda:1'\n[decode]\ndevice = 'cuda'",
            ("--decode-parallel", "tp=2", "--drafter", "0", "--memory-bytes", "7000000000"),
            "",
        ),
    ],
)
def test_workers_of_one_device_get_the_share_that_each_may_take(
    tmp_path: Path,
    started: list[ClusterConfig],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    flags: tuple[str, ...],
    shared: str,
) -> None:
    """Each would take all that is free there. Memory of a device is not counted against the host."""
    monkeypatch.setattr("supervisor.commands.up.memory_limit_bytes", lambda: 8_000_000_000)
    (tmp_path / "c.toml").write_text(text)
    done = CliRunner().invoke(app, ["up", "--config", str(tmp_path / "c.toml"), *flags])
    assert (len(started), done.exit_code == 0) == ((0, False) if shared else (1, True)), done.exception
    if shared:
        assert isinstance(done.exception, InvalidArgument) and done.exception.field == "--memory-bytes"
        assert re.search(shared, done.exception.message)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[up]\ndrafts_from = 'nowhere'", "[up] drafts_from: must be one of auto, remote, local"),
        ("[decode]\nparallel = 'tp'", "[decode] parallel: 'tp' is not one of tp=N, pp=N"),
        ("[up]\nrouters = 1", "[up] no setting is named routers; is router meant?"),
        ("[up]\nrouter = 0", "[up] router: must be a whole number of at least 1"),
        ("[kvstore]\ndram_byte = 1", "[kvstore] no setting is named dram_byte; is dram_bytes meant?"),
        ("[decode]\nadvertise = 'h:1'", "[decode] advertise: each process of this machine needs another one"),
        ("[kvstore]\nkv_advertise = 'h:1'", "[kvstore] kv_advertise: each process of this machine needs"),
        ("[router]\nadmin_advertise = 'h:1'", "[router] admin_advertise: each process of this machine needs"),
        ("[router]\napi_keys = '/none'", "[router] api_keys: /none cannot be read"),
        ("[common]\ntls_ca = '/etc/hosts'", "tls_ca, tls_certificate and tls_key go together"),
    ],
)
def test_a_file_that_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, started: list[ClusterConfig], text: str, words: str
) -> None:
    (tmp_path / "c.toml").write_text(text)
    done = CliRunner().invoke(app, ["up", "--config", str(tmp_path / "c.toml")])
    assert isinstance(done.exception, InvalidArgument)
    assert words in done.exception.message and not started


def test_a_text_of_the_file_that_looks_like_a_flag_is_no_flag(
    tmp_path: Path, started: list[ClusterConfig]
) -> None:
    (tmp_path / "password").touch()
    file = tmp_path / "c.toml"
    file.write_text(
        f"[up]\netcd = '127.0.0.1:1'\n[common]\netcd_user = '--x'\ntls_server_name = '--y'\n"
        f"etcd_password_file = '{tmp_path / 'password'}'\n"
    )
    settings = settings_of(up(started, file))
    assert {each.etcd_user for each in settings.values()} == {"--x"}
    assert {each.tls_server_name for each in settings.values()} == {"--y"}


def test_a_tier_that_the_cluster_does_without_is_not_recommended(started: list[ClusterConfig]) -> None:
    assert CliRunner().invoke(app, ["up", "--drafter", "0", "--kvstore", "0"]).exit_code == 0
    assert settings_of(started[-1])["router-0"].autoscale_limits == "drafter=0:0,kvstore=0:0"
    assert CliRunner().invoke(app, ["up"]).exit_code == 0
    assert settings_of(started[-1])["router-0"].autoscale_limits == "drafter=0:0"
    assert CliRunner().invoke(app, ["up", "--drafter", "1"]).exit_code == 0
    assert settings_of(started[-1])["router-0"].autoscale_limits == ""
    assert CliRunner().invoke(app, ["up", "--prefill", "0", "--drafter", "1"]).exit_code == 0
    assert settings_of(started[-1])["router-0"].autoscale_limits == "prefill=0:0"


def test_a_file_may_begin_with_a_mark_of_utf8(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[up]\ndecode = 7\n", encoding="utf-8-sig")
    assert ClusterFile.read(tmp_path / "c.toml").config_values()["decode"] == 7


def test_the_file_names_its_path_in_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--config: /.*none.toml: cannot be read: No such file"):
        ClusterFile.read(tmp_path / "none.toml")
