"""Workers with the fake engine as separate processes, without a supervisor and without etcd."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import grpc

from libs.common.cluster.worker_record import Role, Worker
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from tests.support.clusters.fake_engines import KV_MEMORY_BYTES
from tests.support.processes.launching import start_service

_ENGINE = ["--engine", "fake", "--fake-pace-s", "0.0003", "--kv-memory-bytes", str(KV_MEMORY_BYTES)]
# Restores wait long for KV, because the machine may be slow.
_ENGINE += ["--restore-floor-ms", "20000"]
_TRANSPORT = ("--transport", "socket")
_START_S = 180.0


class WorkerProcess:
    """`async with`: the process answers inside the block, and has ended after it."""

    def __init__(
        self,
        role: Role,
        instance: str,
        port: int,
        run_dir: Path,
        *arguments: str,
        launcher: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`arguments` come last and override. `launcher`: replaces `-m` and the service's module."""
        self._environment = environment or {}
        self.role, self.instance, self.endpoint = role, instance, f"127.0.0.1:{port}"
        self._command = [sys.executable, *(launcher or ("-m", f"services.{role}")), "--instance", instance]
        self._command += ["--listen", self.endpoint, "--run-dir", str(run_dir), *_TRANSPORT]
        if role is not Role.KVSTORE:
            self._command += ["--model", str(DEFAULT_MODEL)]
        if role in (Role.PREFILL, Role.DECODE):
            self._command += _ENGINE
        self._command += arguments
        self._log = run_dir / f"{instance}.log"
        self._channel: grpc.aio.Channel | None = None  # tests poll, and a new one costs more than a call

    async def __aenter__(self) -> WorkerProcess:
        with self._log.open("wb") as log:
            self._process = await start_service(self._command, log, self._environment)
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    assert self._process.returncode is None, self._log.read_text()
                    try:
                        self._status = await self.status()
                        return self
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.1)
        except BaseException:
            await self._end()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    @property
    def pid(self) -> int:
        """The pid of the process."""
        return self._process.pid

    async def status(self) -> worker_pb2.GetStatusResponse:
        """GetStatus of the process. Raises AioRpcError when it does not answer."""
        channel = self._channel or grpc.aio.insecure_channel(self.endpoint)
        self._channel = None
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer: worker_pb2.GetStatusResponse = await stub.GetStatus(
                worker_pb2.GetStatusRequest(), timeout=60
            )
        except BaseException:
            await channel.close()
            raise
        await self._keep(channel)
        return answer

    def record(self, endpoint: str) -> Worker:
        """The discovery record of the process with `endpoint` as its address."""
        return Worker(
            self.role, self.instance, endpoint, self._status.incarnation, self._status.fingerprint.digest
        )

    async def _keep(self, channel: grpc.aio.Channel | None) -> None:
        """Keep this channel in place of the one of a call at the same time."""
        self._channel, other = channel, self._channel
        if other is not None:
            await other.close()

    async def _end(self) -> None:
        await self._keep(None)
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
