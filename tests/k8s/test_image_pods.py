"""The images as the pods of local-cpu, under runc: the part of a kubelet's work that needs no cluster."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.demo.__main__ import DemoConversation
from bench.demo.script import TURNS
from bench.images.image import buildah, mounted, why_no_containers
from slipstream.async_client import AsyncClient
from slipstream.credentials.api_key_file import add_key
from slipstream.errors import FailedPrecondition
from supervisor.etcd import etcd_binary
from supervisor.health import until_etcd_ready
from tests.k8s.cluster.conftest import IMAGES
from tests.k8s.pod_container import PodContainer, stored_name
from tests.k8s.renders import pods, render

pytestmark = [pytest.mark.images, pytest.mark.timeout(1800)]
START_ORDER = ("kvstore", "prefill", "decode", "drafter", "router")
OVERLAY = "overlays/local-cpu"
ETCD_START_S = 60.0


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, PodContainer], str]]:
    """Every pod, started one after the other, and a tenant's key."""
    names = {tier: stored_name(IMAGES.format(tier=tier)) for tier in START_ORDER}
    if reason := why_no_containers() or _missing(names):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pods")
    folder.chmod(0o755)
    network = ipaddress.IPv4Address("127.0.0.0") + random.SystemRandom().randrange(1 << 10, 1 << 24, 256)
    key = add_key(folder / "keys.toml", name="suite", tenant="suite")
    files = {
        "slipstream-cluster": {"cluster.secret": secrets.token_hex(32).encode()},
        "slipstream-api-keys": {"keys.toml": (folder / "keys.toml").read_bytes()},
    }
    objects = render(OVERLAY)
    templates = {pod.tier: pod for pod in pods(objects)}
    started: dict[str, PodContainer] = {}
    with ExitStack() as stack:
        _start_etcd(stack, folder, network + 2)
        for number, tier in enumerate(START_ORDER, start=3):
            container = PodContainer(
                templates[tier],
                objects,
                stack.enter_context(mounted(names[tier])),
                folder,
                address=network + number,
                secrets=files,
                hosts={"slipstream-etcd": str(network + 2)},
            )
            started[tier] = stack.enter_context(container)
            container.wait_started()
        yield started, key


def _missing(names: dict[str, str]) -> str:
    for name in names.values():
        try:
            buildah("inspect", "--type", "image", name)
        except FailedPrecondition:
            return f"no image {name}: `make images TAG=dev` builds it"
    return ""


def _start_etcd(stack: ExitStack, folder: Path, address: ipaddress.IPv4Address) -> None:
    client, peer = f"http://{address}:2379", f"http://{address}:2380"
    command = [str(etcd_binary()), f"--data-dir={folder}/etcd", "--log-level=warn", "--unsafe-no-fsync"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=default={peer}"]
    log = stack.enter_context((folder / "etcd.log").open("ab"))
    process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
    stack.callback(process.kill)
    asyncio.run(asyncio.wait_for(until_etcd_ready(f"{address}:2379"), ETCD_START_S))


async def test_the_demo_conversation_runs_on_the_pods(
    containers: tuple[dict[str, PodContainer], str],
) -> None:
    started, key = containers
    async with AsyncClient(f"{started['router'].address}:7000", api_key=key) as client:
        conversation = DemoConversation(client)
        for turn in TURNS:
            await conversation.turn(turn, {})
    assert conversation.problems == []
    for container in started.values():
        assert container.passes("readinessProbe") and container.passes("livenessProbe"), container.log


def test_every_pod_ends_in_order_within_its_grace(containers: tuple[dict[str, PodContainer], str]) -> None:
    started, _ = containers
    for tier in reversed(START_ORDER):
        assert started[tier].stop() == 0, started[tier].log[-2000:]
        assert "Traceback" not in started[tier].log
