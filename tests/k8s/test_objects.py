"""Renders are valid: core objects by Kubernetes' schemas, custom ones by schemas of the fields used."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate import utils

from tests.k8s.renders import COMPONENTS, OVERLAYS, RENDERS, name_of, of_kind, pods, render

VERSION = "1.37"
SCHEMAS = Path(__file__).with_name("schemas")


@pytest.fixture(scope="module", autouse=True)
def definitions_read_once() -> Iterator[None]:
    """Keep the schemas of Kubernetes: `validate` reads all definitions, 1 MB, for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


def schema_of(item: Any) -> dict[str, Any] | None:
    """The schema of a custom resource; None for a core object."""
    group, _, version = item["apiVersion"].rpartition("/")
    path = SCHEMAS / f"{group}_{version}_{item['kind']}.json".lower()
    if not path.exists():
        return None
    schema: dict[str, Any] = json.loads(path.read_text())
    return schema


def check(item: Any) -> None:
    """Raises for an unknown field, a wrong type, a missing field, or a kind without a schema."""
    _check(json.dumps(item, sort_keys=True))


@functools.cache  # renders share most objects
def _check(text: str) -> None:
    item = json.loads(text)
    schema = schema_of(item)
    if schema is None:
        assert "." not in item["apiVersion"] or item["apiVersion"].endswith(".k8s.io/v1"), name_of(item)
        kubernetes_validate.validate(item, VERSION, strict=True)
    else:
        jsonschema.Draft202012Validator(schema).validate(item)


def test_all_overlays_and_components_are_found() -> None:
    assert set(OVERLAYS) == {"overlays/local-cpu", "overlays/kimi-k2.5-8xh100", "overlays/16xh200-pd"}
    assert {"tls", "keda", "monitoring", "network-policies", "gateway"} <= set(COMPONENTS)


@pytest.mark.parametrize("name", RENDERS)
def test_every_object_is_valid(name: str) -> None:
    objects = render(name)
    for item in objects:
        check(item)
        assert item["metadata"].get("namespace", "slipstream") == "slipstream", name_of(item)
    assert len({name_of(item) for item in objects}) == len(objects)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pod_templates_of_groups_are_valid(name: str) -> None:
    for pod in pods(render(name)):
        selector = {"matchLabels": pod.labels}
        wrapped = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "wrapped"}}
        template = copy.deepcopy(pod.template)
        template["spec"].pop("restartPolicy", None)  # a job's, which a Deployment's pods cannot have
        kubernetes_validate.validate(
            {**wrapped, "spec": {"selector": selector, "template": template}}, VERSION, strict=True
        )


def test_the_checks_find_an_unknown_field_and_a_wrong_type() -> None:
    overlay = render("overlays/16xh200-pd")
    for kind in (
        "Deployment",
        "Certificate",
        "DisaggregatedSet",
        "HTTPRoute",
        "InferencePool",
        "ServiceMonitor",
    ):
        item = of_kind(overlay, kind)[0]
        check(item)
        for broken in ({"aTypo": 1}, {next(iter(item["spec"])): 1.5}):
            with pytest.raises(Exception, match=r"aTypo|1\.5"):
                check({**item, "spec": {**item["spec"], **broken}})


def test_groups_have_every_pod_that_the_deployments_of_the_base_have() -> None:
    tiers = {pod.tier for pod in pods(render("base"))}
    for name in OVERLAYS:
        assert {pod.tier for pod in pods(render(name))} - {"loader"} == tiers
