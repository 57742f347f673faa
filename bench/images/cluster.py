"""The five images as containers of one cluster, beside an etcd of the machine."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from bench.images.container import Container, ContainerLimits
from bench.images.image import TIERS, Image
from slipstream.client import Client
from slipstream.rpc.cluster_secret import ClusterSecret
from supervisor.etcd import etcd_binary, etcd_command
from supervisor.health import until_etcd_ready, until_grpc_ready
from supervisor.ports import free_ports

MODEL, DRAFT_MODEL = "/models/slipstream-mini", "/models/slipstream-mini-eagle3"
SECRET = "/run/secrets/cluster"
_USER = 65532
_MIB = 1 << 20
# Two to three times what the shipped model takes.
_MEMORY_MIB = {"router": 512, "kvstore": 512, "prefill": 1536, "decode": 1536, "drafter": 1024}
_START_ORDER = ("kvstore", "prefill", "decode", "drafter", "router")
assert set(_START_ORDER) == set(TIERS)


class ContainerCluster:
    """`with ContainerCluster(images, dir) as cluster`: each container was ready once.

    The containers start one by one, so that each start has the machine for itself: `start_s` has the seconds
    from `runc run` to readiness.
    """

    def __init__(
        self, images: Mapping[str, Image], work_dir: Path, *, ready_timeout_s: float = 180.0
    ) -> None:
        """`images` by tier."""
        self._images = images
        self._work_dir = work_dir
        self._ready_timeout_s = ready_timeout_s
        self._stack = ExitStack()
        self._ports = dict(
            zip((*TIERS, "http", "etcd", "peer"), free_ports(8, rng=random.Random()), strict=True)
        )
        self.secret_file = work_dir / "cluster.secret"
        self.containers: dict[str, Container] = {}
        self.start_s: dict[str, float] = {}

    def __enter__(self) -> ContainerCluster:
        with ExitStack() as stack:
            self._start_etcd(stack)
            ClusterSecret.keep_in(self.secret_file)
            self.secret_file.chmod(0o444)
            for tier in _START_ORDER:
                self._start(tier, stack)
            self.client = stack.enter_context(Client(self.endpoint("router")))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def endpoint(self, tier: str) -> str:
        """Where its gRPC server listens."""
        return f"127.0.0.1:{self._ports[tier]}"

    def _start_etcd(self, stack: ExitStack) -> None:
        command = etcd_command(
            etcd_binary(),
            data_dir=self._work_dir / "etcd",
            client_port=self._ports["etcd"],
            peer_port=self._ports["peer"],
        )
        log = stack.enter_context((self._work_dir / "etcd.log").open("ab"))
        process = stack.enter_context(
            subprocess.Popen([*command, "--unsafe-no-fsync"], stdout=log, stderr=log)
        )
        stack.callback(process.kill)
        asyncio.run(asyncio.wait_for(until_etcd_ready(self.endpoint("etcd")), self._ready_timeout_s))

    def _start(self, tier: str, stack: ExitStack) -> None:
        image = self._images[tier]
        data_dir = self._work_dir / "data" / tier
        data_dir.mkdir(parents=True)
        data_dir.chmod(0o700)
        writable: tuple[tuple[Path, str], ...] = ()
        if tier == "kvstore":
            _give(data_dir)
            writable = ((data_dir, "/data"),)
        limits = ContainerLimits(_MEMORY_MIB[tier] * _MIB, writable, ((self.secret_file, SECRET),))
        command = [*image.config["Entrypoint"], *self._arguments(tier)]
        name = f"slipstream-{tier}-{self._ports[tier]}"
        container = Container(name, image, self._work_dir, limits, command=command)
        begun_s = time.monotonic()
        self.containers[tier] = stack.enter_context(container)
        asyncio.run(self._until_ready(tier, container))
        self.start_s[tier] = time.monotonic() - begun_s

    def _arguments(self, tier: str) -> list[str]:
        common = [
            f"--instance={tier}-0",
            f"--listen={self.endpoint(tier)}",
            f"--etcd={self.endpoint('etcd')}",
        ]
        common.append(f"--cluster-secret-file={SECRET}")
        workers = [f"--model={MODEL}", f"--draft-model={DRAFT_MODEL}", "--threads=1"]
        own = {
            "router": [f"--http={self.endpoint('http')}", f"--model={MODEL}"],
            "kvstore": ["--data-dir=/data", f"--dram-bytes={64 * _MIB}", f"--disk-bytes={256 * _MIB}"],
            "prefill": [*workers, f"--kv-memory-bytes={64 * _MIB}"],
            "decode": [*workers, f"--kv-memory-bytes={64 * _MIB}", "--drafts=on"],
            "drafter": workers,
        }
        return common + own[tier]

    async def _until_ready(self, tier: str, container: Container) -> None:
        """Raises RuntimeError with the log's end when the container ends, TimeoutError after a while."""
        ready = asyncio.create_task(until_grpc_ready(self.endpoint(tier)))
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                while not ready.done():
                    if not container.runs:
                        raise RuntimeError(f"{tier} ended: {container.log.read_text()[-2000:]}")
                    await asyncio.wait({ready}, timeout=0.05)
        finally:
            ready.cancel()


def _give(folder: Path) -> None:
    """Make the folder the service's, as `fsGroup` or an init container does in a cluster."""
    os.chown(folder, _USER, _USER)
