"""Processes that listen on all addresses, advertise one for each port, and start before names resolve."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import grpc
import pytest

from libs.common.cluster.discovery import EtcdDiscovery, Fleet
from libs.common.cluster.worker_record import FleetSnapshot, Role
from libs.common.etcd.client import EtcdClient
from slipstream.async_client import AsyncClient
from slipstream.credentials.api_key_file import add_key
from slipstream.errors import Unavailable
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from supervisor.configuration.plan import thread_limits
from supervisor.forking.launcher import RunningProcess
from supervisor.process import service_environment
from tests.support.network.late_names import LateNames
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.launching import fork_launcher

WAIT_S = 180.0
SECRET = "a secret of this test, long enough for all of its processes"
_CLUSTER = ClusterSecret(SECRET.encode())
_ENGINE = ("--engine", "fake", "--model", str(DEFAULT_MODEL))
_PAGES = ("--kv-memory-bytes", str(1 << 20))
# The prefill worker advertises names; the others an address that is not the one they would guess.
_NAME, _NAME_AT, _ADDRESS = "prefill.test", "127.0.0.3", "127.0.0.2"
_KV_NAME, _KV_NAME_AT, _KV_ADDRESS = "kv.test", "127.0.0.4", "127.0.0.5"
_ADMIN_HTTP, _ADMIN = "127.0.0.6", "127.0.0.7"
_OF_ROUTER = ("--admin", "0.0.0.0:0", "--admin-advertise", f"{_ADMIN}:0", "--http", "0.0.0.0:0")
ARGUMENTS: dict[Role, Sequence[str]] = {
    Role.ROUTER: ("--model", str(DEFAULT_MODEL), *_OF_ROUTER),
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
        command += ["--admin-http", "0.0.0.0:0", "--admin-http-advertise", f"{_ADMIN_HTTP}:0"]
        command += ["--cluster-secret-file", str(self._secret), *ARGUMENTS[role], *arguments]
        if role is Role.ROUTER:  # which takes no strangers on all addresses
            command += ["--api-keys", str(self._keys)]
        else:
            kv_host = _KV_NAME if role is Role.PREFILL else _KV_ADDRESS
            command += ["--transport", "socket", "--kv-advertise", f"{kv_host}:0"]
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
    async with dial(endpoint, tokens=TokenMinter(_CLUSTER, "test")) as channel:
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
        await _check_admin_ports(known)
        await services.logged(Role.ROUTER, "prefill-0: the name prefill.test does not resolve")
        names.add(_NAME, _NAME_AT)
        conversation = asyncio.create_task(_converse(known, services.api_key))
        await services.logged(Role.DECODE, f"KV of a peer: the name {_KV_NAME} does not resolve")
        assert not conversation.done()
        names.add(_KV_NAME, _KV_NAME_AT)
        await conversation


async def _check_admin_ports(fleet: FleetSnapshot) -> None:
    """Every admin port answers at its advertised address, to tokens for that one and for no other."""
    (router,) = fleet.with_role(Role.ROUTER)
    assert router.admin.rpartition(":")[0] == _ADMIN
    assert "slipstream_session_writes_total" in await _counters(router.admin)
    with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
        await _counters(f"{_ADDRESS}:{router.admin.rpartition(':')[2]}")
    operator = TokenMinter(_CLUSTER, "test", CallerClass.OPERATOR)
    async with aiohttp.ClientSession() as http:
        for worker in fleet.workers:
            host, _, port = worker.admin_http.rpartition(":")
            assert host == _ADMIN_HTTP, worker
            for named, status in ((host, 200), (_ADDRESS, 401)):
                headers = dict(operator.tokens_for(f"{named}:{port}").metadata())
                async with http.get(f"http://{named}:{port}/metrics", headers=headers) as answer:
                    assert answer.status == status, worker


async def _converse(fleet: FleetSnapshot, api_key: str) -> None:
    """Requests run over all links, and their KV moves by the transports' advertised addresses.

    Each try has another prompt: a decode worker that has computed one before keeps it and pulls nothing.
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
