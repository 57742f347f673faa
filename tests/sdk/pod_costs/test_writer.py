"""The loop between a router's admin port and an API server, and the process that runs it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from slipstream.errors import PermissionDenied, Unavailable
from slipstream.pod_costs.__main__ import LOG_FORMAT_VARIABLE, main, parse
from slipstream.pod_costs.decision import MIN_INTERVAL_S
from slipstream.pod_costs.kube_api import KubeAddress
from slipstream.pod_costs.writer import PodCostWriter
from slipstream.rpc.dial import PLAIN_DIAL
from slipstream.rpc.peer_token import TOKEN_HEADER
from tests.sdk.pod_costs.admin_port import LossPort
from tests.sdk.pod_costs.kube_server import KubeServer, pod
from tests.support.network.ports import own_ports

WAIT_S = 60.0


class Clock:
    """A clock of the test."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A writer with its router, its API server and its clock."""

    def __init__(
        self, folder: Path, address: str, router: LossPort, kube: KubeServer, at: KubeAddress
    ) -> None:
        self.folder, self.router, self.kube, self.at = folder, router, kube, at
        self.clock = Clock()
        self.stopped = asyncio.Event()
        self.writer = PodCostWriter(address, PLAIN_DIAL, at, clock_s=self.clock)

    async def after(self, seconds: float) -> list[tuple[str, int]]:
        """What a round so much later writes."""
        self.clock.now_s += seconds
        return [(write.pod.name, write.cost) for write in await self.writer.round(self.stopped)]


@asynccontextmanager
async def rig(folder: Path, **costs: int) -> AsyncIterator[Rig]:
    router, kube = LossPort(**costs), KubeServer(folder, *(pod("decode", name) for name in costs))
    with kube.serving() as at:
        async with router.serving() as address:
            yield Rig(folder, address, router, kube, at)


async def test_costs_are_written_once_and_again_when_they_change_much(tmp_path: Path) -> None:
    async with rig(tmp_path, a=10, b=50, c=0) as r:
        assert await r.after(15.0) == []  # an earlier writer may have written right before
        assert await r.after(MIN_INTERVAL_S) == [("b", 50), ("a", 10)]
        r.router.costs["decode", "b"] = 52
        assert await r.after(MIN_INTERVAL_S) == await r.after(1.0) == []
        r.router.costs["decode", "b"] = 80
        assert await r.after(1.0) == []  # wanted by one round
        assert await r.after(1.0) == [("b", 80)]
        r.router.costs["decode", "b"] = 10
        assert await r.after(1.0) == await r.after(MIN_INTERVAL_S - 2.0) == []
        assert await r.after(1.0) == [("b", 10)]
        assert r.kube.writes == [("b", "50"), ("a", "10"), ("b", "80"), ("b", "10")]


async def test_a_router_that_knows_nothing_for_a_round_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, a=30) as r:
        r.kube.pods["a"] = pod("decode", "a", "30")
        for cost in (30, 0, 30, 0, 30):
            r.router.costs["decode", "a"] = cost
            assert await r.after(MIN_INTERVAL_S) == []


async def test_a_worker_that_drains_and_pods_of_others_keep_what_they_have(tmp_path: Path) -> None:
    async with rig(tmp_path, a=30) as r:
        for name in ("drains", "theirs"):
            r.kube.pods[name] = pod("decode", name, "77")
        r.kube.pods["theirs"]["labels"]["app.kubernetes.io/name"] = "other"
        r.router.costs["decode", "theirs"] = 5
        await r.after(0.0)
        assert await r.after(MIN_INTERVAL_S) == [("a", 30)]


@pytest.mark.parametrize("status", [404, 409, 422])
async def test_a_pod_that_is_gone_or_changed_holds_up_no_other(tmp_path: Path, status: int) -> None:
    async with rig(tmp_path, a=10, b=50) as r:
        r.kube.forced["b"] = status
        await r.after(0.0)
        assert await r.after(MIN_INTERVAL_S) == [("a", 10)]
        r.kube.forced.clear()
        assert await r.after(1.0) == []  # the failed call counts as a write
        assert await r.after(MIN_INTERVAL_S) == [("b", 50)]


async def test_a_role_that_may_not_patch_ends_the_round(tmp_path: Path) -> None:
    async with rig(tmp_path, a=10, b=50) as r:
        await r.after(0.0)
        r.kube.forced["PATCH"] = 403
        with pytest.raises(PermissionDenied, match="Role"):
            await r.after(MIN_INTERVAL_S)
        assert [method for method, _ in r.kube.calls] == ["GET", "GET", "PATCH"]


async def test_without_a_router_nothing_is_asked_or_written(tmp_path: Path) -> None:
    async with rig(tmp_path, a=10) as r:
        r.router.refuses = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Unavailable, match="not you"):
            await r.after(MIN_INTERVAL_S)
        assert r.kube.calls == []


async def test_a_trouble_is_logged_once_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="slipstream.pod_costs")
    async with rig(tmp_path, a=10) as r:
        r.kube.forced["GET"] = 403
        running = asyncio.create_task(r.writer.run(r.stopped, every_s=0.02))
        async with asyncio.timeout(WAIT_S):
            while len(r.kube.calls) < 3:
                await asyncio.sleep(0.01)
            assert not r.writer.works
            r.kube.forced.clear()
            while not r.writer.works:
                await asyncio.sleep(0.01)
            r.stopped.set()
            await running
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "403" in said[0] and said[1] == "costs are written again"


def probe(port: int, path: str) -> int:
    """The status; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


async def until(port: int, path: str, status: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await asyncio.to_thread(probe, port, path) != status:
            await asyncio.sleep(0.05)


async def test_the_process_asks_as_an_operator_answers_probes_and_ends_by_sigterm(tmp_path: Path) -> None:
    (port,) = own_ports(1)
    (tmp_path / "cluster.secret").write_text("0123456789abcdef" * 4)
    async with rig(tmp_path, a=10) as r, r.router.serving() as address:
        r.kube.forced["GET"] = 403
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slipstream.pod_costs", f"--router={address}", "--every-s=1"),
            *(f"--admin-http=127.0.0.1:{port}", f"--service-account={tmp_path}"),
            f"--cluster-secret-file={tmp_path / 'cluster.secret'}",
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "KUBERNETES_SERVICE_HOST": r.at.host,
                "KUBERNETES_SERVICE_PORT": str(r.at.port),
                "SLIPSTREAM_LOG_FORMAT": "json",
                "HOSTNAME": "pod-costs-x",
            },
        )
        try:
            await until(port, "/healthz/live", 200)
            async with asyncio.timeout(WAIT_S):
                while len(r.kube.calls) < 2:  # the first round has ended
                    await asyncio.sleep(0.05)
            await until(port, "/healthz/ready", 503)
            assert await asyncio.to_thread(probe, port, "/metrics") == 404
            r.kube.forced.clear()
            await until(port, "/healthz/ready", 200)
            process.send_signal(signal.SIGTERM)
            _, said = await asyncio.wait_for(process.communicate(), WAIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0
    assert str(r.router.metadata[TOKEN_HEADER]).startswith("operator:pod-costs:")
    lines = [json.loads(line) for line in said.decode().splitlines()]
    assert {(line["service"], line["instance"]) for line in lines} == {("pod-costs", "pod-costs-x")}
    troubles = [line for line in lines if "no costs are written" in line["message"]]
    assert [line["level"] for line in troubles] == ["warning"] and "first" not in said.decode()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cluster-secret-file=/no/such/file",), "--cluster-secret-file: /no/such/file cannot be read"),
        (("--tls-ca=/no/such/file",), "--tls-ca, --tls-certificate, --tls-key: go together"),
        ((), "KUBERNETES_SERVICE_HOST"),
    ],
)
def test_wrong_flags_end_it_with_their_name(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["--router=r:7001", "--admin-http=127.0.0.1:0", *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_flag_of_the_log_format_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    given = ["--router=r:7001", "--admin-http=127.0.0.1:0"]
    assert parse(given).log_format == "json"
    assert parse([*given, "--log-format=text"]).log_format == "text"
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "")  # as if it were not set, as services take it
    assert parse(given).log_format == "text"


def test_an_unknown_log_format_is_refused_by_what_gave_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "xml")
    for flags, name in (((), LOG_FORMAT_VARIABLE), (("--log-format=xml",), "argument --log-format")):
        with pytest.raises(SystemExit) as refused:
            main(["--router=r:7001", "--admin-http=127.0.0.1:0", *flags])
        assert refused.value.code == 2
        assert f"{name}: must be text or json, not 'xml'" in capsys.readouterr().err


def test_the_writer_needs_nothing_that_the_images_leave_out() -> None:
    """The images have no `slipstream.cli`, typer, rich or prompt_toolkit."""
    absent = ("slipstream.cli", "typer", "rich", "prompt_toolkit", "libs", "services", "aiohttp")
    code = "import sys, slipstream.pod_costs.__main__; print(*sys.modules)"
    done = asyncio.run(_run(code))
    assert "slipstream.pod_costs.writer" in done
    assert not [name for name in done if name.startswith(absent)]


async def _run(code: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    return said.decode().split()
