"""The cluster of KUBECONFIG with overlay local-cpu on it, for as long as the suite runs."""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml

from slipstream.credentials.api_key_file import add_key
from tests.k8s.cluster import load
from tests.k8s.cluster.kubectl import NAMESPACE, Kubectl
from tests.k8s.renders import K8S, TIERS, needs_kubectl

# Where nodes have the images under other names: REGISTRY/slipstream-{tier}:TAG, with {tier}.
IMAGES = os.environ.get("SLIPSTREAM_TEST_IMAGES", "slipstream-{tier}:dev")
ETCD_IMAGE = os.environ.get("SLIPSTREAM_TEST_ETCD_IMAGE", "etcd:v3.5.21")
WORKLOADS = {tier: f"deployment/slipstream-{tier}" for tier in TIERS if tier != "kvstore"}
WORKLOADS |= {tier: f"statefulset/slipstream-{tier}" for tier in ("kvstore", "etcd")}
# What a tier may take to roll.
START_S = float(os.environ.get("SLIPSTREAM_TEST_TIMEOUT_S", "900"))


@dataclass(frozen=True)
class Deployed:
    """The running cluster and a key of a tenant."""

    kubectl: Kubectl
    api_key: str
    images: Mapping[str, str]  # NAME:TAG of each tier
    new_load: Callable[..., load.Load]  # name, each: as of Load

    @property
    def image(self) -> str:
        """The router's, with the packages that helpers in pods need."""
        return self.images["router"]


@contextmanager
def doubled(kubectl: Kubectl, *tiers: str) -> Iterator[None]:
    """A second pod of each tier inside the block: local-cpu has one, and a tier of one is unavailable with
    it."""

    def scale(replicas: int) -> None:
        for tier in tiers:
            kubectl("scale", WORKLOADS[tier], f"--replicas={replicas}")
        for tier in tiers:
            kubectl.wait_rolled(WORKLOADS[tier], timeout_s=START_S)

    scale(2)
    try:
        yield
    finally:
        scale(1)


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    """Of the cluster that KUBECONFIG names; without one the suite is skipped."""
    path = needs_kubectl()
    named = os.environ.get("KUBECONFIG")
    if not named:
        pytest.skip("KUBECONFIG names no cluster: only the tests that need none ran")
    # Without a file kubectl asks localhost, and fails in words that lead nowhere.
    if not any(Path(each).is_file() for each in named.split(os.pathsep)):
        pytest.fail(f"KUBECONFIG names {named}, and there is no such file")
    asked = subprocess.run([path, "get", "--raw", "/readyz"], capture_output=True, text=True, timeout=60)
    if asked.returncode:
        pytest.fail(f"the cluster of KUBECONFIG does not answer: {asked.stderr.strip()}")
    return Kubectl(path)


def secret(name: str, key: str, value: bytes) -> dict[str, object]:
    """A Secret of one key."""
    data = {key: base64.b64encode(value).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


def write_overlay(folder: Path, image_of: Mapping[str, str], *, components: Sequence[str] = ()) -> None:
    """An overlay of local-cpu with the images, NAME:TAG by tier or upstream's name, that the nodes have."""
    images = []
    for tier, image in image_of.items():
        new_name, _, tag = image.rpartition(":")
        name = f"slipstream-{tier}" if tier in TIERS else tier
        images.append({"name": name, "newName": new_name, "newTag": tag})
    k8s = os.path.relpath(K8S, folder.resolve())
    used = [f"{k8s}/components/{name}" for name in components]
    kustomization = {"resources": [f"{k8s}/overlays/local-cpu"], "components": used, "images": images}
    if used:  # an overlay's namespace reaches its own resources only
        kustomization["namespace"] = NAMESPACE
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))


def apply_manifests(kubectl: Kubectl, manifests: str) -> None:
    """Apply them as an operator does, with one owner of all fields, also of those that a test changed."""
    command = ["apply", "--server-side", "--force-conflicts", "--field-manager=suite"]
    kubectl(*command, "-f", "-", given=manifests)


@pytest.fixture(scope="session")
def deployed(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """local-cpu, ready. It removes what it made; a namespace that was there before is left alone."""
    namespaces = {item["metadata"]["name"] for item in kubectl.json("get", "namespaces")["items"]}
    if taken := namespaces & {NAMESPACE, load.NAMESPACE}:
        pytest.fail(
            f"the cluster has the namespace {', '.join(sorted(taken))} already: the suite makes its own"
        )
    folder = tmp_path_factory.mktemp("overlay")
    keys = folder / "keys.toml"
    api_key = add_key(keys, name="suite", tenant="suite")
    images = {**{tier: IMAGES.format(tier=tier) for tier in TIERS}, "etcd": ETCD_IMAGE}
    write_overlay(folder, images)
    manifests = kubectl("kustomize", str(folder))
    loading = Kubectl(needs_kubectl(), load.NAMESPACE)
    try:
        for namespace in (NAMESPACE, load.NAMESPACE):
            kubectl("create", "namespace", namespace)
        kubectl.apply(
            secret("slipstream-cluster", "cluster.secret", secrets.token_hex(32).encode()),
            secret("slipstream-api-keys", "keys.toml", keys.read_bytes()),
        )
        apply_manifests(kubectl, manifests)
        for workload in WORKLOADS.values():
            kubectl.wait_rolled(workload, timeout_s=START_S)
        yield Deployed(kubectl, api_key, images, partial(load.Load, loading, images["router"], api_key))
    finally:
        if not os.environ.get("SLIPSTREAM_TEST_KEEP"):
            kubectl("delete", "-f", "-", "--ignore-not-found", given=manifests, timeout_s=START_S)
            kubectl("delete", "namespace", load.NAMESPACE, "--ignore-not-found", timeout_s=START_S)
