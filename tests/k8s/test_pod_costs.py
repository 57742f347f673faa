"""Component pod-costs: what its pod may do, and that the writer takes what the manifest gives it."""

from __future__ import annotations

import pytest

from slipstream.pod_costs.__main__ import parse
from slipstream.pod_costs.kube_api import NAME, NAME_LABEL, SERVICE_ACCOUNT, TIER_LABEL
from tests.k8s.renders import PodTemplate, of_kind, render, services_of
from tests.k8s.test_objects import check
from tests.k8s.test_settings import given as settings_of

ALONE, WITH_TLS = "components/pod-costs", "components/pod-costs+tls"


def writer(name: str) -> PodTemplate:
    (found,) = [pod for pod in services_of(render(name)) if pod.tier == "pod-costs"]
    return found


@pytest.mark.parametrize("name", [ALONE, WITH_TLS])
def test_the_flags_are_those_of_the_program_and_its_files_are_mounted(name: str) -> None:
    pod = writer(name)
    assert pod.main["command"] == ["python", "-m", "slipstream.pod_costs"]
    given = parse(pod.main["args"])
    mounts = [mount["mountPath"] for mount in pod.main["volumeMounts"]]
    files = [given.cluster_secret_file, given.service_account / "token"]
    if name == WITH_TLS:
        files += [given.tls_ca, given.tls_certificate, given.tls_key]
        (volume,) = [each for each in pod.spec["volumes"] if each["name"] == "operator-tls"]
        (certificate,) = [
            item
            for item in of_kind(render(name), "Certificate")
            if item["spec"]["secretName"] == volume["secret"]["secretName"]
        ]
        assert certificate["spec"]["commonName"] == "slipstream-operator"
    assert all(str(file.parent) in mounts for file in files)


def test_its_lines_have_the_form_of_those_of_the_services() -> None:
    pods = services_of(render(ALONE))
    (router,) = [pod for pod in pods if pod.tier == "router"]
    given = parse(writer(ALONE).main["args"])
    assert given.log_format == dict(settings_of(ALONE, router))["log_format"]


@pytest.mark.parametrize("name", [ALONE, WITH_TLS])
def test_a_router_accepts_the_token_for_the_name_that_is_dialled(name: str) -> None:
    """A token names the endpoint, which must be one of the routers' --server-names."""
    (router,) = [pod for pod in services_of(render(name)) if pod.tier == "router"]
    dialled = parse(writer(name).main["args"]).router
    assert dialled in router.arguments()["server-names"].split(",")
    services = {item["metadata"]["name"]: item for item in of_kind(render(name), "Service")}
    host, _, port = dialled.rpartition(":")
    assert [each["port"] for each in services[host]["spec"]["ports"]] == [int(port)]


def test_its_account_may_list_and_patch_pods_of_its_namespace_and_nothing_else() -> None:
    objects = render(ALONE)
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}]
    (binding,) = of_kind(objects, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": writer(ALONE).spec["serviceAccountName"],
            "namespace": "slipstream",
        }
    ]


def test_only_its_pod_has_a_token_and_that_one_rotates() -> None:
    tokens = {
        pod.tier: source["serviceAccountToken"]
        for pod in services_of(render(ALONE))
        for volume in pod.spec["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
        if "serviceAccountToken" in source
    }
    assert tokens == {"pod-costs": {"path": "token", "expirationSeconds": 3600}}
    (volume,) = [each for each in writer(ALONE).spec["volumes"] if "projected" in each]
    (mount,) = [each for each in writer(ALONE).main["volumeMounts"] if each["name"] == volume["name"]]
    assert mount["mountPath"] == str(SERVICE_ACCOUNT) and mount["readOnly"]
    files = {
        item["path"]
        for source in volume["projected"]["sources"]
        for item in next(iter(source.values())).get("items", [next(iter(source.values()))])
    }
    assert files == {"token", "ca.crt", "namespace"}


def test_the_labels_that_it_looks_for_are_those_of_the_pods_and_their_names_are_instances() -> None:
    for pod in services_of(render(ALONE)):
        assert pod.labels[NAME_LABEL] == NAME and pod.labels[TIER_LABEL] == pod.tier
        if pod.tier in ("router", "prefill", "decode", "drafter"):
            assert pod.kind == "Deployment" and pod.arguments()["instance"] == "$(POD_NAME)"


def test_it_reaches_the_api_server_routers_and_names_alone() -> None:
    for policy in of_kind(render(ALONE), "NetworkPolicy"):
        if policy["metadata"]["name"] != "slipstream-pod-costs":
            continue
        ports = [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]]
        assert ports == [[443, 6443], [7001], [53, 53]]
        assert ["to" in rule for rule in policy["spec"]["egress"]] == [False, True, True]
        assert "ingress" not in policy["spec"]
        break
    else:
        pytest.fail("no policy of its own")


def test_every_object_with_tls_is_valid() -> None:
    for item in render(WITH_TLS):
        check(item)
