from __future__ import annotations

import inspect
import os
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.common import worker_bounds
from libs.common.cluster.worker_record import Role
from libs.common.runtime.settings import rows
from libs.worker.process.bounded_end import BoundedEnd
from slipstream.credentials.api_key_file import add_key
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.rpc.tls import TlsFiles
from supervisor.commands.up import with_fitting_draft_model
from supervisor.configuration.cluster_file import SETTINGS, UpSettings
from supervisor.configuration.cluster_options import ROOT, WorkerSizes
from supervisor.configuration.config_check import idle_drafters, keyless
from supervisor.configuration.plan import ClusterConfig, ProcessPlan, plan_services, ports_needed
from supervisor.configuration.worker_sizes import check_driver
from supervisor.ports import FIRST_PORT, LAST_PORT, free_ports, require_free


def plan(config: ClusterConfig) -> dict[str, ProcessPlan]:
    ports = list(range(21_000, 21_000 + ports_needed(config)))
    plans = plan_services(config, etcd="127.0.0.1:2379", ports=ports, cpu_count=8)
    return {p.instance: p for p in plans}


def flag(process: ProcessPlan, name: str) -> str | None:
    command = list(process.command)
    return command[command.index(name) + 1] if name in command else None


def test_the_workers_share_three_quarters_of_the_memory() -> None:
    for config, share in (
        (ClusterConfig(prefill=1, decode=2), 1 << 30),
        (
            ClusterConfig(
                prefill=1, decode=2, file_memory_bytes=dict.fromkeys((Role.PREFILL, Role.DECODE), 1 << 20)
            ),
            None,
        ),
    ):
        plans = plan_services(config, etcd="e:1", ports=list(range(7000, 7040)), memory_bytes=4 << 30)
        found = {p.instance: flag(p, "--memory-bytes") for p in plans}
        wanted = None if share is None else str(share)
        assert [found[name] for name in ("prefill-0", "decode-0", "decode-1")] == [wanted] * 3
        assert found["router-0"] is found["kvstore-0"] is None


def test_memory_that_the_file_states_for_one_tier_leaves_the_other_tiers_their_share() -> None:
    config = ClusterConfig(
        decode=2,
        file_device={Role.PREFILL: "cuda"},
        file_memory_bytes={Role.PREFILL: 1 << 34},
        from_file=frozenset({"memory_bytes", "device"}),
    )
    plans = plan_services(config, etcd="e:1", ports=list(range(7000, 7040)), memory_bytes=4 << 30)
    found = {p.instance: flag(p, "--memory-bytes") for p in plans}
    assert [found[name] for name in ("prefill-0", "decode-0", "decode-1")] == [None, *[str(3 << 29)] * 2]


@pytest.mark.parametrize(("stated", "left"), [(1 << 30, 1 << 30), (2 << 30, 1 << 29)])
def test_memory_that_the_file_gives_one_tier_is_missing_in_the_share_of_the_other(
    stated: int, left: int
) -> None:
    config = ClusterConfig(prefill=1, decode=2, file_memory_bytes={Role.PREFILL: stated})
    plans = plan_services(config, etcd="e:1", ports=list(range(7000, 7040)), memory_bytes=4 << 30)
    found = {p.instance: flag(p, "--memory-bytes") for p in plans}
    assert [found[name] for name in ("prefill-0", "decode-0", "decode-1")] == [None, *[str(left)] * 2]


def test_drafters_without_work_are_named() -> None:
    asked = ClusterConfig(drafters=1)
    off = replace(asked, drafts="off")
    assert idle_drafters(off) == ["--drafter: drafters have no work with --drafts off"]
    for config in (asked, replace(off, drafters=None), replace(off, etcd="127.0.0.1:2379")):
        assert idle_drafters(config) == []


def test_drafts_without_a_head_are_named() -> None:
    """`--drafter 0` takes the shipped head away; one that is stated stays, and runs in decode workers."""
    without = with_fitting_draft_model(ClusterConfig(drafts="on", drafters=0))
    assert idle_drafters(without) == [
        "--drafts on has no effect: no worker has a draft head (--draft-model names one)"
    ]
    with_head = (ClusterConfig(drafts="on"), ClusterConfig(drafts="on", drafters=0, draft_model=Path("head")))
    fake = replace(without, from_file=frozenset({"engine"}))
    for config in (*map(with_fitting_draft_model, with_head), replace(without, drafts="auto"), fake):
        assert idle_drafters(config) == []


def test_a_device_of_drafters_that_do_not_run_is_named() -> None:
    stated = ClusterConfig(file_device={Role.DRAFTER: "cuda:1"})
    assert idle_drafters(stated) == [
        "[drafter] device = cuda:1 has no effect: no drafter runs here (--drafter 1 starts one)"
    ]
    of_all = {Role.PREFILL: "cuda", Role.DECODE: "cuda", Role.DRAFTER: "cuda"}
    beside = ClusterConfig(sizes=WorkerSizes(device="cuda:1"), drafts_from="local")
    without = replace(beside, drafts_from="auto", drafters=0)
    for config in (replace(stated, drafters=1), replace(stated, file_device=of_all), ClusterConfig()):
        assert idle_drafters(config) == []
    for config in (beside, without, replace(beside, file_device={Role.DRAFTER: "cuda:1"})):
        assert config.counts()[Role.DRAFTER] == 0 and idle_drafters(config) == []


def test_a_file_without_keys_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch()
    config = ClusterConfig(api_keys=file)
    (said,) = keyless(config)
    assert said.startswith(f"--api-keys: {file} has no keys, and every call that needs one is refused")
    add_key(file, name="a", tenant="anna")
    assert keyless(config) == keyless(ClusterConfig()) == []


def test_a_device_without_a_driver_is_refused_by_what_states_it() -> None:
    file = Path("/c.toml")
    by_flag = ClusterConfig(sizes=WorkerSizes(device="cuda:1"), file_device={Role.DECODE: "cuda"})
    by_file = ClusterConfig(config_file=file, file_device={Role.DECODE: "cuda", Role.PREFILL: "cpu"})
    no_drafter = ClusterConfig(config_file=file, file_device={Role.DRAFTER: "cuda"})
    for config, field in ((by_flag, "--device"), (by_file, "/c.toml: [decode] device")):
        check_driver(config.stated_devices(), has_driver=True)
        with pytest.raises(InvalidArgument, match=r"cuda.* is not here: NVIDIA's driver, libcuda") as refused:
            check_driver(config.stated_devices(), has_driver=False)
        assert refused.value.field == field
    for config in (no_drafter, ClusterConfig(), ClusterConfig(sizes=WorkerSizes(device="cpu"))):
        check_driver(config.stated_devices(), has_driver=False)


def test_memory_that_a_flag_states_is_no_share() -> None:
    config = ClusterConfig(prefill=1, decode=2, sizes=WorkerSizes(memory_bytes=1 << 30))
    plans = plan_services(config, etcd="e:1", ports=list(range(7000, 7040)), memory_bytes=4 << 30)
    found = {p.instance: (p.command.count("--memory-bytes"), flag(p, "--memory-bytes")) for p in plans}
    assert [found[name] for name in ("prefill-0", "decode-0", "decode-1")] == [(1, str(1 << 30))] * 3


def test_a_worker_on_a_device_gets_no_share_of_the_host() -> None:
    """Its --memory-bytes is of the device; the workers on the host share more."""
    config = ClusterConfig(prefill=1, decode=2, file_device={Role.DECODE: "cuda"})
    plans = plan_services(config, etcd="e:1", ports=list(range(7000, 7040)), memory_bytes=4 << 30)
    found = {p.instance: flag(p, "--memory-bytes") for p in plans}
    assert [found[f"decode-{n}"] for n in (0, 1)] == [None, None]
    assert found["prefill-0"] == str(3 << 30)


@pytest.mark.parametrize(
    ("fields", "n_drafters", "drafter"),
    [
        ({}, 0, "local"),
        ({"drafters": 0}, 0, "local"),
        ({"drafters": 2}, 2, None),
        ({"drafts_from": "remote"}, 1, None),
        ({"drafts_from": "local"}, 0, "local"),
        ({"drafts_from": "local", "drafters": 1}, 1, "local"),
        ({"decode_parallel": "tp=2"}, 1, None),
        ({"file_parallel": {Role.DECODE: "tp=2"}, "from_file": frozenset({"parallel"})}, 1, None),
        ({"file_parallel": {Role.DECODE: "tp=2"}, "prefill_parallel": "tp=2"}, 1, None),
        ({"file_parallel": {Role.PREFILL: "tp=2"}, "from_file": frozenset({"parallel"})}, 0, "local"),
        ({"decode_parallel": "tp=1"}, 0, "local"),
        ({"file_parallel": {Role.DECODE: "tp=2"}, "decode_parallel": ""}, 0, "local"),
        ({"sizes": WorkerSizes(device="cuda:1")}, 1, None),
        ({"file_device": {Role.DECODE: "cuda"}}, 1, None),
        ({"file_device": {Role.PREFILL: "cuda"}}, 0, "local"),
        ({"file_device": {Role.DECODE: "cuda"}, "sizes": WorkerSizes(device="cpu")}, 0, "local"),
    ],
)
def test_the_draft_head_runs_where_a_draft_is_cheapest(
    fields: dict[str, Any], n_drafters: int, drafter: str | None
) -> None:
    plans = plan(ClusterConfig(decode=1, **fields))
    assert sum(name.startswith("drafter-") for name in plans) == n_drafters
    assert flag(plans["decode-0"], "--drafter") == drafter
    limits = flag(plans["router-0"], "--autoscale-limits")
    assert limits == (None if n_drafters else "drafter=0:0")


def test_one_process_may_have_further_arguments() -> None:
    plans = plan(
        ClusterConfig(drafts_from="local", instance_arguments={"decode-1": ("--drafter", "service")})
    )
    assert plans["decode-1"].command[-2:] == ("--drafter", "service")
    assert "service" not in plans["decode-0"].command


def test_an_empty_flag_takes_the_cut_of_the_file_away() -> None:
    config = ClusterConfig(prefill=1, decode=1, file_parallel={Role.DECODE: "tp=2"}, decode_parallel="")
    assert [place.n_ranks for place in config.workers()] == [1, 1]
    assert config.parallel_name(Role.DECODE) == "--decode-parallel"
    assert flag(plan(config)["decode-0"], "--parallel") == "", "goes before the file that the worker reads"


def test_each_tier_has_its_own_cut() -> None:
    plans = plan(ClusterConfig(prefill_parallel="tp=2", decode_parallel="tp=2,pp=2"))
    cuts = {instance: cut for instance, p in plans.items() if (cut := flag(p, "--parallel"))}
    assert cuts == {
        "prefill-0": "tp=2",
        "prefill-1": "tp=2",
        "decode-0": "tp=2,pp=2",
        "decode-1": "tp=2,pp=2",
    }


def test_free_ports_are_free_and_different() -> None:
    ports = free_ports(20, rng=random.Random(1))
    assert len(set(ports)) == 20
    assert all(FIRST_PORT <= port <= LAST_PORT for port in ports)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", ports[0]))
        busy.listen()
        again = free_ports(20, rng=random.Random(1), taken=ports[1:3])
        assert not set(ports) & set(again)  # a process may not listen on its ports yet
        with pytest.raises(InvalidArgument, match=r"--http: .* in use"):
            require_free(f"127.0.0.1:{ports[0]}", flag="--http")
    require_free(f"127.0.0.1:{ports[0]}", flag="--http")
    with pytest.raises(FailedPrecondition, match="no 20000 free"):
        free_ports(20_000, rng=random.Random(1))


def test_processes_that_choose_alike_are_given_different_ports(tmp_path: Path) -> None:
    """And one that is killed leaves nothing in the temp folder."""
    chosen = free_ports(1, rng=random.Random(7))
    code = "import random; from supervisor.ports import free_ports\n"
    code += "print(free_ports(1, rng=random.Random(7))[0], flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        others = int(other.stdout.readline())
        other.kill()
    assert FIRST_PORT <= others <= LAST_PORT
    assert others // 32 != chosen[0] // 32  # not even near: each has the block to itself
    assert not list(tmp_path.iterdir())


def test_what_hangs_ends_itself_before_it_is_killed() -> None:
    """The worker's own bound, and the drain that it has before, in one table with the supervisor's."""
    config = ClusterConfig(drafters=1)
    plans = plan(config).values()
    assert {process.role for process in plans} == set(Role)
    for process in plans:
        settings = rows(SETTINGS[Role(process.role)])
        is_router = process.role == Role.ROUTER
        drain_s = config.drain_s if is_router else settings["drain_s"].default
        killed_s = process.drain_s + config.grace_s
        assert killed_s >= drain_s + worker_bounds.END_S + worker_bounds.KILL_MARGIN_S
    assert worker_bounds.KILL_MARGIN_S >= 5 and worker_bounds.MODEL_STOP_S < worker_bounds.CLOSE_S
    assert UpSettings().grace_s == config.grace_s
    ends = inspect.signature(BoundedEnd).parameters
    assert (ends["close_s"].default, ends["threads_s"].default) == (
        worker_bounds.CLOSE_S,
        worker_bounds.THREADS_S,
    )


def test_keys_certificates_and_etcd_access_reach_the_services(tmp_path: Path) -> None:
    tls = TlsFiles(tmp_path / "ca", tmp_path / "pem", tmp_path / "key", "peers.internal")
    config = ClusterConfig(
        etcd="e:1",
        etcd_ca=tmp_path / "etcd-ca",
        etcd_user="slipstream",
        etcd_password_file=tmp_path / "password",
        tls=tls,
        api_keys=tmp_path / "keys.toml",
        shared_prefix=tmp_path / "prompt.txt",
        prices=tmp_path / "prices.toml",
        cors_origins="https://chat.example",
        access_log="off",
        log_format="json",
        tls_client_ca=tmp_path / "clients",
        allow_requested_prefill=True,
        served_model_name="helper",
        disk_bytes=123,
    )
    plans = plan(config)
    for process in plans.values():
        assert flag(process, "--tls-ca") == str(tls.ca)
        assert flag(process, "--tls-certificate") == str(tls.certificate)
        assert flag(process, "--tls-key") == str(tls.key)
        assert flag(process, "--tls-server-name") == "peers.internal"
        assert flag(process, "--etcd-ca") == str(tmp_path / "etcd-ca")
        assert flag(process, "--etcd-user") == "slipstream"
        assert flag(process, "--etcd-password-file") == str(tmp_path / "password")
        is_router = process.role == Role.ROUTER
        assert flag(process, "--api-keys") == (str(tmp_path / "keys.toml") if is_router else None)
        assert flag(process, "--prices") == (str(tmp_path / "prices.toml") if is_router else None)
        assert flag(process, "--cors-origins") == ("https://chat.example" if is_router else None)
        assert flag(process, "--access-log") == ("off" if is_router else None)
        assert flag(process, "--log-format") == "json"
        assert flag(process, "--tls-client-ca") == (str(tmp_path / "clients") if is_router else None)
        assert ("--allow-requested-prefill" in process.command) == is_router
        assert flag(process, "--allowed-hosts") is None
        assert flag(process, "--shared-prefix") == (str(tmp_path / "prompt.txt") if is_router else None)
        assert flag(process, "--served-model-name") == ("helper" if is_router else None)
        assert flag(process, "--disk-bytes") == ("123" if process.role == Role.KVSTORE else None)
    plain = plan(ClusterConfig()).values()
    assert not any({"--tls-ca", "--allow-requested-prefill"} & set(process.command) for process in plain)
