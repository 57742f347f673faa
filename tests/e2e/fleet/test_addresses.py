"""Processes that listen on all addresses, advertise one of their own, and start before names resolve."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from libs.common.cluster.discovery import EtcdDiscovery, Fleet
from libs.common.cluster.worker_record import FleetSnapshot, Role
from libs.common.etcd.client import EtcdClient
from slipstream.api_key_file import add_key
from slipstream.async_client import AsyncClient
from slipstream.errors import Unavailable
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from supervisor.cluster_options import DEFAULT_MODEL
from supervisor.forking.launcher import RunningProcess
from supervisor.plan import thread_limits
from supervisor.process import service_environment
from tests.support.network.late_names import LateNames
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.launching import fork_launcher

WAIT_S = 180.0
SECRET = "a secret of this test, long enough for all of its processes"
_ENGINE = ("--engine", "fake", "--model", str(DEFAULT_MODEL))
_PAGES = ("--kv-memory-bytes", str(1 << 20))
_ADMIN = ("--admin", "0.0.0.0:0", "--admin-http", "0.0.0.0:0", "--http", "0.0.0.0:0")
# The prefill worker advertises a name; the others an address that is not the one they would guess.
_NAME, _NAME_AT, _ADDRESS = "prefill.test", "127.0.0.3", "127.0.0.2"
ARGUMENTS: dict[Role, Sequence[str]] = {
    Role.ROUTER: ("--model", str(DEFAULT_MODEL), *_ADMIN),
    Role.PREFILL: (*_ENGINE, *_PAGES),
    Role.DECODE: (*_ENGINE, *_PAGES),
    Role.KVSTORE: ("--disk-bytes", "0", "--dram-bytes", str(4 << 20)),
    Role.DRAFTER: _ENGINE,
}


class _Services:
    """One process of each service, which all listen on 0.0.0.0."""

    def __init__(self, run_dir: Path, names: LateNames) -> None:
        self._run_dir = run_dir
        self._variables = {**thread_limits(), **names.environment}
        self._launcher = fork_launcher(names.environment)  # no other fork server has the library of names
        self._secret = run_dir / "cluster.secret"
        self._secret.write_text(SECRET)
        self._keys = run_dir / "keys.toml"
        self.api_key = add_key(self._keys, name="anna", tenant="anna")
        self._processes: dict[Role, RunningProcess] = {}

    async def start(self, role: Role, *arguments: str) -> None:
        host = _NAME if role is Role.PREFILL else _ADDRESS
        command = [sys.executable, "-m", f"services.{role}", "--instance", f"{role}-0"]
        command += ["--listen", "0.0.0.0:0", "--advertise", f"{host}:0", "--run-dir", str(self._run_dir)]
        command += ["--cluster-secret-file", str(self._secret), *ARGUMENTS[role], *arguments]
        if role is Role.ROUTER:  # which takes no strangers on all addresses
            command += ["--api-keys", str(self._keys)]
        else:
            command += ["--transport", "socket"]
        environment = service_environment(self._variables)
        with self._log_path(role).open("wb") as log:
            self._processes[role] = await self._launcher.launch(command, environment, log.fileno())

    async def logged(self, role: Role, text: str) -> None:
        """Wait for a line of the process's log."""
        async with asyncio.timeout(WAIT_S):
            while text not in self.log(role):
                assert self._processes[role].returncode is None, self.log(role)
                await asyncio.sleep(0.05)

    def log(self, role: Role) -> str:
        return self._log_path(role).read_text()

    def _log_path(self, role: Role) -> Path:
        return self._run_dir / f"{role}.log"

    async def end(self) -> None:
        """Kill what runs."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        self._launcher.close()


async def _counters(endpoint: str) -> dict[str, float]:
    tokens = TokenMinter(ClusterSecret(SECRET.encode()), "test")
    async with dial(endpoint, tokens=tokens) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        return dict((await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=60)).counters)


def _endpoint(fleet: FleetSnapshot, role: Role) -> str:
    (worker,) = fleet.with_role(role)
    return worker.endpoint


async def test_a_cluster_comes_up_although_no_name_resolves_at_its_start(tmp_path: Path) -> None:
    names = LateNames(tmp_path)
    services = _Services(tmp_path, names)
    async with AsyncExitStack() as stack:
        etcd = stack.enter_context(EtcdProcess(tmp_path / "etcd"))
        stack.push_async_callback(services.end)
        port = etcd.endpoint.rpartition(":")[2]
        for role in Role:
            await services.start(role, "--etcd", f"etcd.test:{port}")
        for role in Role:
            await services.logged(role, "etcd: the name etcd.test does not resolve")
        names.add("etcd.test", "127.0.0.1")
        client = EtcdClient([etcd.endpoint])
        stack.push_async_callback(client.close)
        fleet = await stack.enter_async_context(Fleet(EtcdDiscovery(client)))
        known = await fleet.wait_until(
            lambda now: {worker.role for worker in now.workers} == set(Role), timeout_s=WAIT_S
        )
        hosts = {worker.role: worker.endpoint.rpartition(":")[0] for worker in known.workers}
        assert hosts == {role: _NAME if role is Role.PREFILL else _ADDRESS for role in Role}
        (router,) = known.with_role(Role.ROUTER)
        assert {end.rpartition(":")[0] for end in (router.admin, router.admin_http)} == {_ADDRESS}
        await services.logged(Role.ROUTER, "prefill-0: the name prefill.test does not resolve")
        names.add(_NAME, _NAME_AT)
        await _converse(known, services.api_key)


async def _converse(fleet: FleetSnapshot, api_key: str) -> None:
    """Requests run over all links, and their KV moves by the transports' advertised addresses.

    Each try has a prompt of its own: a decode worker that has computed one before keeps it and pulls nothing.
    """
    pulled = tries = 0
    router = AsyncClient(_endpoint(fleet, Role.ROUTER), api_key=api_key)
    async with asyncio.timeout(WAIT_S), router as client:
        while not pulled:  # until the router has a link to the prefill worker, decode does it all
            tries += 1
            prompt = [{"role": "user", "content": f"{tries} two three four five six seven eight nine " * 40}]
            try:
                reply = await client.chat(prompt, max_tokens=8, timeout_s=WAIT_S)
            except Unavailable:  # nor does the router have a link to the decode worker at first
                await asyncio.sleep(0.2)
                continue
            assert reply.stats is not None and reply.finish_reason in ("length", "stop")
            pulled = reply.stats.kv_bytes_pulled
            await asyncio.sleep(0.2)
        while not (await _counters(_endpoint(fleet, Role.KVSTORE))).get("slipstream_kv_bytes_pulled_total"):
            await asyncio.sleep(0.1)
