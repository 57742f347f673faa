"""The API server admits every object of every overlay and component, with strict field validation."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.cluster.kubectl import NAMESPACE, Kubectl
from tests.k8s.renders import RENDERS, needs_kubectl, of_kind, render

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]
# Beside the namespace of the manifests: an apply there would change what runs, which some fields forbid.
_BESIDE = f"{NAMESPACE}-admission"


@pytest.fixture(scope="module")
def beside(kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace that no pod runs in."""
    kubectl("create", "namespace", _BESIDE)
    try:
        yield Kubectl(needs_kubectl(), _BESIDE)
    finally:
        kubectl("delete", "namespace", _BESIDE, timeout_s=600)


@pytest.fixture(scope="module")
def known(kubectl: Kubectl) -> set[tuple[str, str]]:
    """(apiVersion, kind) of all that the cluster has. Of custom resources it may have some."""
    rows = [line.split() for line in kubectl("api-resources", "--no-headers").splitlines()]
    return {(row[-3], row[-1]) for row in rows}


def _moved(item: Any) -> Any:
    """The object in the other namespace."""
    moved = copy.deepcopy(item)
    if "namespace" in moved["metadata"]:
        moved["metadata"]["namespace"] = _BESIDE
    return moved


def _admit(kubectl: Kubectl, *items: Any) -> str:
    """What the API server says of them; it keeps none."""
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": [_moved(item) for item in items]})
    return kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-",
        given=given,
    )  # fmt: skip


@pytest.mark.parametrize("name", RENDERS)
def test_the_api_server_admits_every_object(beside: Kubectl, known: set[tuple[str, str]], name: str) -> None:
    objects = [item for item in render(name) if item["kind"] != "Namespace"]
    admitted = [item for item in objects if (item["apiVersion"], item["kind"]) in known]
    said = _admit(beside, *admitted)
    assert said.count("(server dry run)") == len(admitted), said
    if missing := sorted({item["kind"] for item in objects if item not in admitted}):
        pytest.skip(f"{len(admitted)} objects are admitted, but the cluster has no {', '.join(missing)}")


def test_the_api_server_refuses_an_unknown_field(beside: Kubectl) -> None:
    item = copy.deepcopy(of_kind(render("base"), "Deployment")[0])
    _admit(beside, item)
    broken: Any = copy.deepcopy(item)
    broken["spec"]["template"]["spec"]["aTypo"] = 1
    with pytest.raises(AssertionError, match="aTypo"):
        _admit(beside, broken)
