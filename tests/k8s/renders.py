"""What kustomize makes of deploy/k8s, and the pods in it."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.render_cache import kept_render

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = tuple(sorted(f"overlays/{path.parent.name}" for path in K8S.glob("overlays/*/kustomization.yaml")))
COMPONENTS = tuple(sorted(path.parent.name for path in K8S.glob("components/*/kustomization.yaml")))
# What a component is used together with, and listed after.
NEEDED = {
    "keda": ("tls",),
    "keda-groups": ("gpu-groups", "tls"),
    "keda-zero": ("tls", "keda"),
    "inference-pool": ("gateway",),
    "pod-costs": ("network-policies",),
}
# The overlays whose engine tiers are groups.
GROUPS = tuple(name for name in OVERLAYS if "gpu-groups" in (K8S / name / "kustomization.yaml").read_text())
# Overlays with the component that scales them. Those of groups have component tls already.
SCALED_OVERLAYS = tuple(f"{name}+keda-groups" if name in GROUPS else f"{name}+tls+keda" for name in OVERLAYS)
RENDERS = ("base", *OVERLAYS, *(f"components/{name}" for name in COMPONENTS), *SCALED_OVERLAYS)
# libyaml's, where PyYAML has it: the loader in Python takes longer than kustomize.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TIERS = ("router", "prefill", "decode", "kvstore", "drafter")

Object = Mapping[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """A pod template with the object that has it."""

    owner: str  # kind/name
    kind: str
    template: Object

    @property
    def spec(self) -> Object:
        """The pod's spec."""
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        """The pod's labels."""
        labels: Mapping[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def tier(self) -> str:
        """router, prefill, .., etcd or loader."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def main(self) -> Object:
        """The container of the service."""
        container: Object = self.spec["containers"][0]
        return container

    def arguments(self) -> dict[str, str]:
        """The last value of each argument `--name=value` by name; "" for a switch."""
        parts = (argument.removeprefix("--").partition("=") for argument in self.main.get("args", ()))
        return {name: value for name, _, value in parts}


def needs_kubectl() -> str:
    """kubectl's path; skips the test where it is absent or has no kustomize of this decade."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl (with kustomize 5) to render deploy/k8s")
    return kubectl


@functools.cache
def render(name: str) -> tuple[Object, ...]:
    """The objects of the base, of an overlay, or of either with components.

    `components/a+b` has the base and what its components need; `overlays/name+a` has just what it names.
    """
    kubectl = needs_kubectl()
    binary = os.stat(kubectl)
    sources = f"{kubectl} {binary.st_size} {binary.st_mtime_ns} {_sources()}"
    return tuple(kept_render(name, sources, lambda: _render(kubectl, name)))


def _render(kubectl: str, name: str) -> list[Object]:
    with tempfile.TemporaryDirectory() as made:
        folder = K8S / name
        if "+" in name or name.startswith("components/"):
            folder = Path(made).resolve()
            resource, components = _parts(name)
            relative = os.path.relpath(K8S, folder)
            used = [f"{relative}/components/{each}" for each in components]
            text = yaml.safe_dump(
                {"namespace": "slipstream", "resources": [f"{relative}/{resource}"], "components": used}
            )
            (folder / "kustomization.yaml").write_text(text)
        done = subprocess.run(
            [kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=_LOADER) if document]


@functools.cache
def _sources() -> str:
    """A digest of everything that a render depends on in this repository."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(path for path in K8S.parent.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _parts(name: str) -> tuple[str, list[str]]:
    """What a combination builds on, and its components in the order to list them."""
    first, *others = name.split("+")
    if first.startswith("overlays/"):
        return first, others
    named = [first.removeprefix("components/"), *others]
    return "base", [each for own in named for each in (*NEEDED.get(own, ()), own)]


def name_of(item: Object) -> str:
    """kind/name."""
    return f"{item['kind']}/{item['metadata']['name']}"


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    """The objects of these kinds."""
    return [item for item in objects if item["kind"] in kinds]


def pods(objects: tuple[Object, ...]) -> Iterator[PodTemplate]:
    """Every pod template of the objects, those of groups too."""
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield PodTemplate(name_of(item), item["kind"], item["spec"]["template"])
        elif item["kind"] == "DisaggregatedSet":
            for role in item["spec"]["roles"]:
                group = role["spec"]["leaderWorkerTemplate"]
                for key in ("leaderTemplate", "workerTemplate"):
                    if key in group:
                        yield PodTemplate(f"{name_of(item)}/{role['name']}", item["kind"], group[key])


def services_of(objects: tuple[Object, ...]) -> list[PodTemplate]:
    """The pods that run for ever: not those of jobs."""
    return [pod for pod in pods(objects) if pod.kind != "Job"]


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches. Raises AssertionError for an operator that no manifest uses."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def config_maps(objects: tuple[Object, ...]) -> dict[str, Mapping[str, str]]:
    """The data of each ConfigMap by name."""
    return {item["metadata"]["name"]: item["data"] for item in of_kind(objects, "ConfigMap")}
