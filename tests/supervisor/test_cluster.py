"""Clusters of real processes: a real etcd and fake services (tests/support/clusters/fake_service.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from libs.common.etcd.client import EtcdClient
from slipstream.cluster_record import is_running, read_record
from slipstream.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SlipstreamError,
)
from supervisor import process_stats
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration import config_check
from supervisor.configuration.cluster_options import DEFAULT_MODEL, WorkerSizes
from tests.supervisor.conftest import FakeCluster
from tests.support.clusters.supervised import supervised
from tests.support.processes.etcd_process import EtcdProcess, free_port
from tests.support.processes.process_checks import alive, all_gone, eventually, mentioning


def pids(cluster: ClusterSupervisor) -> dict[str, int]:
    return {p.instance: p.pid for p in cluster.record().processes if p.pid is not None}


async def test_starts_in_order_restarts_and_stops_in_the_reverse_order(fake: FakeCluster) -> None:
    said: list[str] = []
    run_dir = fake.config.run_dir
    # None of these is ready before all have started: one after the other, they would never be.
    fake.behave(kvstore_0="meets", prefill_0="meets", decode_0="meets", drafter_0="meets")
    async with supervised(fake.but(kvstores=1, drafters=1), say=said.append) as cluster:
        first = pids(cluster)
        assert set(first) == {"etcd", "kvstore-0", "prefill-0", "decode-0", "drafter-0", "router-0"}
        assert cluster.rss_bytes() > 50e6
        assert cluster.ready_s is not None
        # The router starts when all others are ready.
        ready = {event["instance"]: event["at"] for event in fake.events("ready")}
        started = {event["instance"]: event["at"] for event in fake.events("started")}
        router_started = started.pop("router-0")
        assert router_started > max(at for name, at in ready.items() if name != "router-0")
        assert max(started.values()) < min(at for name, at in ready.items() if name != "router-0")

        record = read_record(run_dir)
        assert record == cluster.record()
        assert {process.state for process in record.processes} == {"ready"}
        ports = [int(p.endpoint.rpartition(":")[2]) for p in record.processes]
        assert len(set(ports)) == 6
        assert all(20_000 <= port < 30_000 for port in ports)
        router = next(event for event in fake.events("started") if event["instance"] == "router-0")
        assert router["argv"][router["argv"].index("--etcd") + 1] == record.etcd
        assert router["argv"][router["argv"].index("--http") + 1] == record.router_http

        cluster.kill("decode-0")
        await eventually(lambda: pids(cluster).get("decode-0") not in (None, first["decode-0"]))
        await eventually(lambda: {p.state for p in cluster.record().processes} == {"ready"})
        assert read_record(run_dir).find("decode-0").restarts == 1
        assert any("decode-0 was ended by SIGKILL; starting it again in 0.5 s" in line for line in said)

        await cluster.hold("drafter-0")
        assert "drafter-0" not in pids(cluster)
        assert read_record(run_dir).find("drafter-0").state == "held"
        await cluster.release("drafter-0")
        assert alive(pids(cluster)["drafter-0"])
        with pytest.raises(NotFound, match="decode-0"):
            cluster.kill("decode-7")
        last = pids(cluster)
    assert not any(alive(pid) for pid in [*first.values(), *last.values()])
    # The router had stopped before any other process began to stop.
    stopped = {event["instance"]: event["at"] for event in fake.events("stopped")}
    stopping = {event["instance"]: event["at"] for event in fake.events("stopping")}
    assert stopped["router-0"] < min(at for name, at in stopping.items() if name != "router-0")
    assert not is_running(run_dir)
    with pytest.raises(NotFound):
        read_record(run_dir)
    log = (run_dir / "logs" / "cluster.log").read_text()
    assert "etcd       | " in log or "decode-0   | " in log


async def test_a_killed_etcd_comes_back_with_its_data(fake: FakeCluster) -> None:
    async with supervised(fake.but(prefill=0, decode=0)) as cluster:
        client = EtcdClient([cluster.record().etcd], timeout_s=100)
        await client.put("/a", b"1")
        cluster.kill("etcd")
        entry = await client.get("/a")
        assert entry is not None
        assert entry.value == b"1"
        await client.close()


async def test_a_start_drops_the_data_of_an_earlier_etcd_and_no_other_file(fake: FakeCluster) -> None:
    """A run directory may be a project's folder, which has files in a folder of that name."""
    folder = fake.config.run_dir / "etcd"
    other, earlier = folder / "mine.txt", folder / "member" / "old"
    for file in (other, earlier):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    async with supervised(fake.but(prefill=0, decode=0)) as cluster:
        assert cluster.record().find("etcd").state == "ready"
    assert other.read_text() == "x" and not earlier.exists()


async def test_a_service_that_cannot_start_ends_it_all_and_says_why(fake: FakeCluster) -> None:
    fake.behave(decode_0="exit")
    said: list[str] = []
    with pytest.raises(FailedPrecondition, match=r"(?s)decode-0 does not start.*this service has no hope"):
        async with supervised(fake.config, say=said.append):
            raise AssertionError("unreachable")
    starts = [event["at"] for event in fake.events("started") if event["instance"] == "decode-0"]
    assert len(starts) == 3
    # The pauses grow: 0.5 s, then 1 s.
    assert starts[1] - starts[0] >= 0.5
    assert starts[2] - starts[1] >= 1.0
    assert not mentioning(str(fake.config.run_dir))
    assert not is_running(fake.config.run_dir)


async def test_a_service_that_is_never_ready_is_named(fake: FakeCluster) -> None:
    fake.behave(prefill_0="never_ready")
    for timeout_s in (3, 12, 50):  # until a slow machine starts the others in that time
        with pytest.raises(DeadlineExceeded) as late:
            async with supervised(fake.but(ready_timeout_s=timeout_s), say=lambda line: None):
                raise AssertionError("unreachable")
        if f"not ready within {timeout_s} s: prefill-0;" in late.value.message:
            break
    assert f"not ready within {timeout_s} s: prefill-0;" in late.value.message
    assert not mentioning(str(fake.config.run_dir))


async def test_a_service_that_ignores_sigterm_is_killed_with_its_children(fake: FakeCluster) -> None:
    fake.behave(prefill_0="deaf", decode_0="breeds")
    for grace_s in (1, 4, 16, 60):  # until a slow machine stops the others in that time
        said: list[str] = []
        before = len(fake.events("bred"))
        async with supervised(fake.but(grace_s=grace_s), say=said.append) as cluster:
            running = pids(cluster)
            children = [event["pid"] for event in fake.events("bred")][before:]
            assert all(alive(pid) for pid in children)
        assert len(children) == 1
        assert not any(alive(pid) for pid in running.values())
        await all_gone(children)
        late = [line for line in said if "did not stop" in line]
        if len(late) == 1:
            break
    assert late == [f"prefill-0 did not stop within {grace_s} s and was killed"]


async def test_one_cluster_a_run_directory(fake: FakeCluster) -> None:
    small = fake.but(prefill=0, decode=0)
    async with supervised(small):
        with pytest.raises(FailedPrecondition, match="already runs"):
            async with supervised(small):
                raise AssertionError("unreachable")
        assert is_running(small.run_dir)


async def test_an_external_etcd_is_used_and_left_alone(
    fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.cluster._EXTERNAL_ETCD_S", 60.0)
    with EtcdProcess(tmp_path / "etcd") as etcd:
        config = fake.but(prefill=0, decode=0, etcd=etcd.endpoint)
        async with supervised(config) as cluster:
            assert set(pids(cluster)) == {"router-0"}
            assert cluster.record().etcd == etcd.endpoint
        client = EtcdClient([etcd.endpoint], timeout_s=60)
        assert await client.get("/a") is None
        await client.close()


async def refused(
    fake: FakeCluster, match: str, *, kind: type[SlipstreamError] = FailedPrecondition, **changes: object
) -> None:
    with pytest.raises(kind, match=match):
        async with supervised(fake.but(**changes)):
            raise AssertionError("unreachable")
    assert not is_running(fake.config.run_dir)


async def wrong_flag(fake: FakeCluster, match: str, **changes: object) -> None:
    await refused(fake, match, kind=InvalidArgument, **changes)


async def test_cuts_that_no_worker_runs_are_refused_before_anything_starts(fake: FakeCluster) -> None:
    shipped: dict[str, Any] = {"model": DEFAULT_MODEL}
    cuda: dict[str, Any] = {"sizes": WorkerSizes(device="cuda:2")}
    of_file: dict[str, Any] = {"file_parallel": {Role.DECODE: "tp=2,pp=7"}}
    named = r"--config, \[decode\] parallel"
    await wrong_flag(fake, "--decode-parallel: ep=2 does not divide", decode_parallel="ep=2")
    await wrong_flag(fake, "--prefill-parallel: 'tp' is not one of", prefill_parallel="tp")
    kv = "--decode-parallel: kv=3 does not divide the"
    await wrong_flag(fake, f"{kv} 64 tokens", **shipped, decode_parallel="kv=3")
    await wrong_flag(fake, f"{kv} 32 tokens", **shipped, decode_parallel="kv=3", block_tokens=32)
    heads = "tp=5 does not divide the model's"
    await wrong_flag(fake, f"--prefill-parallel: {heads}", **shipped, prefill_parallel="tp=5")
    await wrong_flag(fake, f"{named}: pp=7 is more than the model's 5 layers", **shipped, **of_file)
    split = "--decode-parallel: kv=2: the triton kernels do not split KV"
    await wrong_flag(fake, split, **cuda, decode_parallel="kv=2")
    moved = "--prefill-parallel: dp=2 moves sequences between ranks, whose KV pages are separate on cuda:2"
    await wrong_flag(fake, moved, **cuda, prefill_parallel="dp=2")
    # Of workers that do not run, nothing is asked.
    config_check.check_config(fake.but(**shipped, **of_file, decode=0, etcd="127.0.0.1:1"))
    captured = r"--config, \[decode\] decode_steps: 'graphs' captures steps of one process"
    await wrong_flag(fake, captured, **cuda, **of_file, decode_steps="graphs")


async def test_what_cannot_work_is_refused_before_anything_starts(
    fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        await wrong_flag(fake, f"--http: {address} is in use", http=address)
        await wrong_flag(fake, f"--grpc: {address} is in use", grpc=address)
    for wrong in ("127.0.0.1:port", "8000", "127.0.0.1:0", "127.0.0.1:99999"):
        await wrong_flag(fake, f"--http: '{wrong}' is not host:port", http=wrong)
    await wrong_flag(fake, "--grpc: cannot listen on 192.0.2.1:80", grpc="192.0.2.1:80")
    both = f"127.0.0.1:{free_port()}"
    await wrong_flag(fake, "need different ports", http=both, grpc=both)
    await wrong_flag(fake, "--drafts: must be one of auto, on, off", drafts="maybe")
    await wrong_flag(fake, "--etcd: must be HOST:PORT, not 'nohost'", etcd="nohost")
    for none in ("", ","):
        await wrong_flag(fake, "--etcd: names no HOST:PORT", etcd=none)
    await wrong_flag(fake, "--log-level: must be", log_level="loud")
    await wrong_flag(fake, "--transport: must be", transport="pigeon")
    await wrong_flag(fake, "--pool: must be one of mooncake", pool="none")
    for flag in ("http", "grpc"):
        anyone = f"--{flag}: 0.0.0.0:1 is not a loopback address, .* needs --api-keys"
        await wrong_flag(fake, anyone, **{flag: "0.0.0.0:1"})
    await wrong_flag(fake, "--model: .*config.json is missing", model=tmp_path / "nowhere")
    await wrong_flag(fake, "--draft-model: .*config.json is missing", draft_model=tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to("circle")
    for flag in ("model", "draft_model"):
        many = f"--{flag.replace('_', '-')}: .* cannot be read: Too many levels of symbolic links"
        await wrong_flag(fake, many, **{flag: tmp_path / "circle"})
    await refused(fake, "circle cannot be the run directory: File exists", run_dir=tmp_path / "circle")
    deep = "[" * 100_000
    for text, why in (("{", "is not JSON"), ("[]", "holds no JSON object"), (deep, "is not JSON")):
        broken = tmp_path / f"broken-{len(text)}"
        broken.mkdir()
        (broken / "config.json").write_text(text)
        await wrong_flag(fake, f"--model: .*config.json {why}", model=broken)
    await wrong_flag(fake, "at least one router", routers=0)
    (tmp_path / "file").touch()
    await refused(fake, "file cannot be the run directory: File exists", run_dir=tmp_path / "file")
    await refused(fake, "cannot be the run directory: Not a directory", run_dir=tmp_path / "file" / "run")
    with socket.socket() as silent:  # taken, so that no process can listen there
        silent.bind(("127.0.0.1", 0))
        absent = f"127.0.0.1:{silent.getsockname()[1]}"
        await refused(fake, f"no etcd at {absent}", etcd=absent)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    await refused(fake, "no etcd binary: install")
    assert not fake.events("started")


async def test_missing_libraries_of_mooncake_are_an_error_of_one_line(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_check, "_MOONCAKE_LIBRARIES", {"libnowhere1": "libnowhere.so.1"})
    await wrong_flag(fake, r"--transport mooncake: libnowhere.so.1 does not load", transport="mooncake")
    await wrong_flag(fake, r"--pool mooncake: libnowhere.so.1 does not load", pool="mooncake")
    assert not fake.events("started")
    await wrong_flag(fake, "--transport: must be", transport="pigeon")  # auto and socket need no library


@pytest.mark.parametrize(
    ("free", "etcd", "needed"), [(143, None, "144, most of it for etcd's log"), (15, "127.0.0.1:1", "16$")]
)
async def test_a_disk_without_room_is_an_error_before_anything_starts(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, free: int, etcd: str | None, needed: str
) -> None:
    real = os.statvfs(fake.config.run_dir)
    blocks = free * 1_000_000 // real.f_frsize
    full = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, blocks, blocks, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    await wrong_flag(
        fake,
        f"--run-dir: .* has {free} MB free, a cluster needs {needed}",
        etcd=etcd,
        run_dir=fake.config.run_dir,
    )
    # What our own etcd wrote in the run before goes first; beside another one it stays.
    old = fake.config.run_dir / "etcd" / "member" / "wal"
    old.mkdir(parents=True)
    (old / "0.wal").write_bytes(bytes(2_000_000))
    with contextlib.nullcontext() if etcd is None else pytest.raises(InvalidArgument):
        config_check.check_config(fake.but(etcd=etcd))
    assert not fake.events("started")


async def test_a_disk_that_fills_up_costs_the_record_and_no_process(fake: FakeCluster) -> None:
    said: list[str] = []
    run_dir = fake.config.run_dir
    async with supervised(fake.config, say=said.append) as cluster:

        def back(restarts: int) -> bool:
            process = cluster.record().find("decode-0")
            return process.restarts == restarts and process.state == "ready"

        before = pids(cluster)["decode-0"]
        in_the_way = run_dir / "cluster.json.new"
        in_the_way.mkdir()  # nothing can be written there now
        cluster.kill("decode-0")
        await eventually(lambda: back(1))
        assert pids(cluster)["decode-0"] != before
        assert read_record(run_dir).find("decode-0").pid == before
        assert len([line for line in said if "cannot be noted" in line]) == 1
        in_the_way.rmdir()
        cluster.kill("decode-0")
        await eventually(lambda: back(2))
        assert read_record(run_dir) == cluster.record()


async def test_nothing_survives_the_supervisors_sigkill(fake: FakeCluster) -> None:
    """The supervisor gets no chance to act; the kernel ends its children."""
    fake.behave(decode_0="deaf")
    supervisor = await start_supervisor(fake)
    try:
        await eventually(lambda: supervisor.returncode is not None or is_ready(fake.config.run_dir))
        children = [p.pid for p in read_record(fake.config.run_dir).processes]
        assert len(children) == 4
        assert all(pid is not None and alive(pid) for pid in children)
        fork_servers = set(process_stats.children(supervisor.pid)) - set(children)
        assert len(fork_servers) == 1
        os.kill(supervisor.pid, signal.SIGKILL)
        await all_gone(fork_servers)
        await all_gone([pid for pid in children if pid is not None])
        # The kernel ends the children with one thread of the supervisor, the lock with the last.
        await eventually(lambda: not is_running(fake.config.run_dir))
        with pytest.raises(NotFound):
            read_record(fake.config.run_dir)
    finally:
        if supervisor.returncode is None:
            try:
                supervisor.kill()
            except ProcessLookupError:
                pass
        await supervisor.wait()
    # The directory can be used again at once.
    async with supervised(fake.but(prefill=0, decode=0)) as cluster:
        assert set(pids(cluster)) == {"etcd", "router-0"}


async def start_supervisor(fake: FakeCluster) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.clusters.fake_cluster"),
        *(str(fake.config.run_dir), str(fake.config.model)),
    )


def is_ready(run_dir: Path) -> bool:
    try:
        return json.loads((run_dir / "cluster.json").read_text())["ready_s"] is not None
    except (OSError, ValueError):
        return False
