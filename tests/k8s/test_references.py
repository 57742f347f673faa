"""Every name that an object refers to is in the same render, or in the list of what the operator makes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest

from bench.autoscale.rules import UP_WINDOW_S
from tests.k8s.renders import (
    COMPONENTS,
    GROUPS,
    K8S,
    RENDERS,
    SCALED_OVERLAYS,
    TIERS,
    Object,
    config_maps,
    name_of,
    of_kind,
    pods,
    render,
)

SCALED = ("components/keda", "components/keda-groups", "components/keda-zero", *SCALED_OVERLAYS)

# What README.md says how to make, because it is secret or belongs to the site.
MADE_BY_HAND = {
    "Secret/slipstream-cluster",
    "Secret/slipstream-api-keys",
    "Secret/slipstream-scrape",
    "Secret/slipstream-postgresql",
    "Secret/slipstream-database",
    "PersistentVolumeClaim/slipstream-weights-source",
    "Gateway/slipstream",
}


def existing(objects: tuple[Object, ...]) -> set[str]:
    """What the render makes, with the Secrets of certificates and the claims of StatefulSets."""
    found = {name_of(item) for item in objects}
    found |= {f"Secret/{item['spec']['secretName']}" for item in of_kind(objects, "Certificate")}
    return found | {scaler for item in of_kind(objects, "DisaggregatedSet") for scaler in role_scalers(item)}


def role_scalers(item: Object) -> dict[str, Object]:
    """What the controller of a DisaggregatedSet makes to scale its External roles, with their specs."""
    return {
        f"DisaggregatedSetRoleScaler/{item['metadata']['name']}-{role['name']}": role["spec"]
        for role in item["spec"]["roles"]
        if role["scaling"]["mode"] == "External"
    }


def of_pods(objects: tuple[Object, ...]) -> Iterator[str]:
    """What pods refer to."""
    for pod in pods(objects):
        yield f"ServiceAccount/{pod.spec['serviceAccountName']}"
        yield f"PriorityClass/{pod.spec['priorityClassName']}"
        for volume in pod.spec["volumes"]:
            if "secret" in volume:
                yield f"Secret/{volume['secret']['secretName']}"
            if "configMap" in volume:
                yield f"ConfigMap/{volume['configMap']['name']}"
            if "persistentVolumeClaim" in volume:
                yield f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}"
        for container in (*pod.spec["containers"], *pod.spec.get("initContainers", ())):
            for variable in container.get("env", ()):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    yield f"Secret/{reference['name']}"
            for source in container.get("envFrom", ()):
                yield f"ConfigMap/{source['configMapRef']['name']}"


def of_others(objects: tuple[Object, ...]) -> Iterator[str]:
    """What the other objects refer to."""
    for item in objects:
        spec = item.get("spec", {})
        match item["kind"]:
            case "StatefulSet":
                yield f"Service/{spec['serviceName']}"
            case "Certificate":
                yield f"Issuer/{spec['issuerRef']['name']}"
            case "Issuer" if "ca" in spec:
                yield f"Secret/{spec['ca']['secretName']}"
            case "RoleBinding":
                yield f"{item['roleRef']['kind']}/{item['roleRef']['name']}"
                yield from (f"{each['kind']}/{each['name']}" for each in item["subjects"])
            case "TriggerAuthentication":
                yield from (f"Secret/{each['name']}" for each in spec["secretTargetRef"])
            case "ScaledObject":
                yield f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}"
                for trigger in spec["triggers"]:
                    yield f"Service/{trigger['metadata']['scalerAddress'].partition('.')[0]}"
                    yield f"TriggerAuthentication/{trigger['authenticationRef']['name']}"
            case "HTTPRoute":
                yield from (f"{each['kind']}/{each['name']}" for each in spec["parentRefs"])
                for rule in spec["rules"]:
                    yield from (f"{each['kind']}/{each['name']}" for each in rule["backendRefs"])
            case "ServiceMonitor":
                for endpoint in spec["endpoints"]:
                    if "authorization" in endpoint:
                        yield f"Secret/{endpoint['authorization']['credentials']['name']}"


@pytest.mark.parametrize("name", RENDERS)
def test_every_name_exists(name: str) -> None:
    objects = render(name)
    referred = {*of_pods(objects), *of_others(objects)}
    assert len(referred) > 8
    assert referred - existing(objects) - MADE_BY_HAND == set()


@pytest.mark.parametrize("name", RENDERS)
def test_every_mount_has_its_volume(name: str) -> None:
    objects = render(name)
    claims = {
        name_of(item): [each["metadata"]["name"] for each in item["spec"].get("volumeClaimTemplates", ())]
        for item in of_kind(objects, "StatefulSet")
    }
    for pod in pods(objects):
        volumes = [volume["name"] for volume in pod.spec["volumes"]] + claims.get(pod.owner, [])
        assert len(set(volumes)) == len(volumes)
        containers = (*pod.spec["containers"], *pod.spec.get("initContainers", ()))
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        assert mounted == set(volumes), pod.owner


@pytest.mark.parametrize("name", RENDERS)
def test_names_in_addresses_exist(name: str) -> None:
    objects = render(name)
    services = {item["metadata"]["name"] for item in of_kind(objects, "Service")}
    files = next(data for key, data in config_maps(objects).items() if key.startswith("slipstream-config"))
    common = tomllib.loads(files["10-cluster.toml"])["common"]
    assert common["etcd"].partition(":")[0] in services
    (etcd,) = (
        item for item in of_kind(objects, "StatefulSet") if item["metadata"]["name"] == "slipstream-etcd"
    )
    arguments = " ".join(etcd["spec"]["template"]["spec"]["containers"][0]["args"])
    assert set(re.findall(r"\.([a-z-]+):2380", arguments)) == {etcd["spec"]["serviceName"]}
    members = re.search(r"--initial-cluster=(\S+)", arguments)
    assert members is not None and len(members.group(1).split(",")) == etcd["spec"]["replicas"]


@pytest.mark.parametrize("name", SCALED)
def test_keda_scales_each_tier_by_its_own_metric(name: str) -> None:
    objects = render(name)
    targets = {name_of(item): item["spec"] for item in of_kind(objects, "Deployment", "StatefulSet")}
    for item in of_kind(objects, "DisaggregatedSet"):
        targets |= role_scalers(item)
        assert item["spec"].get("slices", 1) == 1, "External roles have one slice only"
    scaled = of_kind(objects, "ScaledObject")
    assert sorted(item["metadata"]["name"] for item in scaled) == sorted(f"slipstream-{t}" for t in TIERS)
    for item in scaled:
        (trigger,) = item["spec"]["triggers"]
        assert item["metadata"]["name"] == f"slipstream-{trigger['metadata']['tier']}"
        assert item["spec"]["minReplicaCount"] <= item["spec"]["maxReplicaCount"]
        assert "replicas" not in targets[name_of_target(item)], "an apply would set the replicas back"
        behavior = item["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] == UP_WINDOW_S, "as the figures of docs/"


@pytest.mark.parametrize("name", ["components/keda-zero", f"{GROUPS[0]}+keda-groups+keda-zero"])
def test_keda_zero_lets_those_tiers_have_no_replica_that_answers_do_without(name: str) -> None:
    scaled = of_kind(render(name), "ScaledObject")
    none_at_least = {item["metadata"]["name"] for item in scaled if not item["spec"]["minReplicaCount"]}
    assert none_at_least == {"slipstream-prefill", "slipstream-drafter"}


def test_component_keda_by_itself_does_not_fit_groups() -> None:
    objects = render(f"{GROUPS[0]}+keda")
    missing = {name_of_target(item) for item in of_kind(objects, "ScaledObject")} - existing(objects)
    assert missing == {"Deployment/slipstream-prefill", "Deployment/slipstream-decode"}


def test_every_component_that_scales_is_in_a_tested_combination() -> None:
    for name in COMPONENTS:
        if of_kind(render(f"components/{name}"), "ScaledObject"):
            assert f"components/{name}" in SCALED, name


def name_of_target(item: Object) -> str:
    """kind/name of what a ScaledObject scales."""
    target = item["spec"]["scaleTargetRef"]
    return f"{target['kind']}/{target['name']}"


def test_the_readme_says_how_to_make_what_no_render_has() -> None:
    text = (K8S / "README.md").read_text()
    for reference in MADE_BY_HAND:
        assert reference.partition("/")[2] in text, reference
    assert text.count("kubectl") > 5
