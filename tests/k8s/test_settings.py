"""Each flag and variable in a manifest is a setting of that service, with a value that it takes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from libs.common.runtime.config_file import file_values, read_sections
from libs.common.runtime.loading import CONFIG_VARIABLE
from libs.common.runtime.settings import ENVIRONMENT_PREFIX, Row, rows
from libs.engine.parallel.sizes import parse_sizes
from libs.planner.cards import GIB, parse_cards
from libs.planner.fit import PROCESS_OVERHEAD_BYTES, HostMemory, Staging, kv_shares
from libs.planner.kv_cache import kv_cache_bytes
from libs.planner.plan import make_plan
from libs.planner.shapes.read_shape import read_shape
from libs.worker.process.settings import EngineSettings
from services.decode.settings import DecodeSettings
from services.router.settings import RouterSettings
from supervisor.configuration.cluster_file import SETTINGS
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from tests.k8s.renders import K8S, RENDERS, TIERS, PodTemplate, config_maps, render, services_of
from tests.planner.shapes import kimi

# What the image sets already, or the pod states for its arguments.
_OWN = ("POD_NAME", "POD_IP")
_OF_LIBPQ = ("PGPASSWORD", "PGSSLROOTCERT")
_SECRET = "(a key of a Secret)"


def given(name: str, pod: PodTemplate) -> Iterator[tuple[str, str]]:
    """The settings of the pod's service as (name of the setting, value), a later one before an earlier one:
    those of the mounted file, of variables, and of arguments."""
    for setting, value in file_settings(name, pod).items():
        yield setting, str(value).lower() if isinstance(value, bool) else str(value)
    for variable, value in variables(pod).items():
        if variable != CONFIG_VARIABLE:
            assert variable.startswith(ENVIRONMENT_PREFIX), f"{pod.owner}: {variable}"
            yield variable.removeprefix(ENVIRONMENT_PREFIX).lower(), value
    for argument in pod.main["args"]:
        flag, _, value = argument.partition("=")
        assert flag.startswith("--"), f"{pod.owner}: {argument}"
        yield flag[2:].replace("-", "_"), value


def file_settings(name: str, pod: PodTemplate) -> dict[str, Any]:
    """What the service takes from the ConfigMap that is mounted where SLIPSTREAM_CONFIG says."""
    directory = variables(pod)[CONFIG_VARIABLE]
    (mount,) = [each["name"] for each in pod.main["volumeMounts"] if each["mountPath"] == directory]
    (volume,) = [each for each in pod.spec["volumes"] if each["name"] == mount]
    files = config_maps(render(name))[volume["configMap"]["name"]]
    with tempfile.TemporaryDirectory() as folder:
        for key, text in files.items():
            (Path(folder) / key).write_text(text)
        sections = read_sections(Path(folder))
    values = file_values(SETTINGS[Role(pod.tier)], sections, pod.tier, checks_files=False)
    return {key: value for key, (value, _) in values.items()}


def variables(pod: PodTemplate) -> dict[str, str]:
    """The pod's variables by name, without those of its name and address."""
    stated = {variable["name"]: variable.get("value", _SECRET) for variable in pod.main.get("env", ())}
    return {key: value for key, value in stated.items() if key not in (*_OWN, *_OF_LIBPQ)}


def check_value(row: Row, value: str) -> None:
    """Raises ValueError for a value that the setting refuses. Files are not there."""
    value = value.replace("$(POD_IP)", "10.1.2.3").replace("$(POD_NAME)", "slipstream-decode-5d4f9-x2x9p")
    if row.type is bool:
        assert value in ("", "true", "false"), row.flag
    elif row.type is not Path:
        typed = row.type(value)
        assert not row.described.choices or typed in row.described.choices, row.flag
        if row.described.check is not None:
            row.described.check(typed)


@pytest.mark.parametrize("name", RENDERS)
def test_every_flag_and_variable_is_a_setting_of_its_service(name: str) -> None:
    pods = [pod for pod in services_of(render(name)) if pod.tier in TIERS]
    assert {pod.tier for pod in pods} == set(TIERS)
    for pod in pods:
        known = rows(SETTINGS[Role(pod.tier)])
        for setting, value in given(name, pod):
            assert setting in known, f"{pod.owner}: {pod.tier} has no setting {setting}"
            if value != _SECRET:
                check_value(known[setting], value)


@pytest.mark.parametrize("name", RENDERS)
def test_every_service_has_its_own_name_and_address_and_the_secret(name: str) -> None:
    for pod in services_of(render(name)):
        if pod.tier not in TIERS:
            continue
        settings = dict(given(name, pod))
        assert settings["instance"] == "$(POD_NAME)"
        assert settings["listen"] == "0.0.0.0:7000" and settings["advertise"] == "$(POD_IP):7000"
        assert settings["admin_http"] == "0.0.0.0:9090"
        assert settings["etcd"] == "slipstream-etcd:2379"
        assert settings["log_format"] == "json", pod.owner
        mounts = [mount["mountPath"] for mount in pod.main["volumeMounts"]]
        files = [settings["cluster_secret_file"], settings["run_dir"], settings.get("api_keys", "/tmp/")]
        files += [
            value for key, value in settings.items() if re.match("tls_(ca|cert|key|client)|etcd_ca", key)
        ]
        files += [settings[key] for key in ("data_dir", "disk") if key in settings]
        for file in files:
            assert any(file == mount or file.startswith(f"{mount}/") for mount in mounts), (pod.owner, file)


@pytest.mark.parametrize("name", RENDERS)
def test_a_router_pod_is_one_process(name: str) -> None:
    """A ServiceMonitor and a probe reach the first process of a pod only, and an HPA counts pods."""
    (router,) = [pod for pod in services_of(render(name)) if pod.tier == "router"]
    assert dict(given(name, router)).get("processes", "1") == "1"


@pytest.mark.parametrize("name", ["components/postgresql", "components/external-database"])
def test_the_routers_of_a_database_name_it_and_its_password_is_a_secret(name: str) -> None:
    (router,) = [pod for pod in services_of(render(name)) if pod.tier == "router"]
    assert dict(given(name, router))["database"] in (
        _SECRET,
        "postgresql://slipstream@slipstream-postgresql/slipstream",
    )
    (password,) = [each for each in router.main["env"] if each["name"] == "PGPASSWORD"]
    assert password["valueFrom"]["secretKeyRef"]["key"] == "password"
    base = next(pod for pod in services_of(render("base")) if pod.tier == "router")
    assert router.main["resources"] == base.main["resources"]
    assert "database" not in dict(given("base", base))


def test_libpq_finds_the_authority_of_an_external_database() -> None:
    """sslmode=verify-full, as README.md names it, refuses to connect without the file."""
    (router,) = [pod for pod in services_of(render("components/external-database")) if pod.tier == "router"]
    (named,) = [each["value"] for each in router.main["env"] if each["name"] == "PGSSLROOTCERT"]
    (mount,) = [each for each in router.main["volumeMounts"] if each["name"] == "database-ca"]
    (volume,) = [each["secret"] for each in router.spec["volumes"] if each["name"] == "database-ca"]
    assert [f"{mount['mountPath']}/{item['path']}" for item in volume["items"]] == [named]
    assert volume["secretName"] == "slipstream-database" and volume["optional"]


@pytest.mark.parametrize(("name", "cards"), [("kimi-k2.5-8xh100", "8xh100-80"), ("16xh200-pd", "8xh200")])
def test_the_groups_of_kimi_are_cut_as_the_planner_says(name: str, cards: str) -> None:
    plan = make_plan(kimi(), *parse_cards(cards))
    best = plan.runnable
    assert best is not None
    cut, wanted = best.fit.cut, plan.worker_arguments(best)
    tiers = {pod.tier: pod for pod in services_of(render(f"overlays/{name}"))}
    for tier in ("prefill", "decode"):
        stated = tiers[tier].arguments()
        assert {flag: stated[flag] for flag in wanted} == wanted
        assert parse_sizes(stated["parallel"]).n_ranks == cut.n_cards
        assert int(stated["memory-bytes"]) * cut.n_cards > kimi().weights_bytes
        resources = tiers[tier].main["resources"]
        for kind in ("requests", "limits"):  # of the host
            stated_resources = {key: resources[kind][key] for key in plan.pod_resources(best)}
            assert stated_resources == plan.pod_resources(best), (tier, kind)
        assert memory_bytes(resources["limits"]["memory"]) < int(stated["memory-bytes"]) * cut.n_cards


def test_the_resources_of_a_pod_are_processes_copies_and_one_checkpoint() -> None:
    plan = make_plan(kimi(), *parse_cards("8xh100"))
    copies, kv_bytes = memory_bytes(plan.pod_resources()["hugepages-2Mi"]), plan.chosen.fit.kv_bytes
    assert copies == Staging().n_bytes(kv_bytes) == 4 * GIB
    wanted = kimi().weights_bytes + 8 * PROCESS_OVERHEAD_BYTES + kv_bytes + copies
    assert 0 <= memory_bytes(plan.pod_resources()["memory"]) - wanted < GIB


def test_the_readme_states_memory_and_kv_of_the_plan() -> None:
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    plans = {cards: make_plan(kimi(), *parse_cards(cards)) for cards in ("8xh100", "8xh200")}
    bests = {cards: plan.runnable for cards, plan in plans.items()}
    fits = {cards: best.fit for cards, best in bests.items() if best is not None}
    seen = {cards: 8 * parse_cards(cards)[1].visible_bytes / GIB for cards in fits}
    kv = {cards: fit.kv_bytes / GIB for cards, fit in fits.items()}
    copies = {cards: 8 // kv_shares(kimi(), fit.cut) for cards, fit in fits.items()}
    wanted = (
        f"Kimi-K2.5 has {kimi().weights_bytes / GIB:.0f} GiB of weights. At the cuts of these overlays "
        f"8 H100 ({seen['8xh100']:.0f} GiB), which store each token's KV {copies['8xh100']} times, hold "
        f"{kv['8xh100']:.1f} GiB of distinct KV, and 8 H200 ({seen['8xh200']:,.0f} GiB), which store it "
        f"{copies['8xh200']} times, {kv['8xh200']:.0f} GiB."
    )
    assert wanted in readme
    for cards, plan in plans.items():
        best = bests[cards]
        resources = {name: amount.removesuffix("Gi") for name, amount in plan.pod_resources(best).items()}
        assert f"| {resources['memory']} GiB, and {resources['hugepages-2Mi']} GiB of huge pages |" in readme
        assert f"{fits[cards].host_bytes / GIB:.0f} GiB for processes, pages and staged copies" in readme
        assert plan.worker_arguments(best)["parallel"] in readme


@pytest.mark.parametrize("name", RENDERS)
def test_only_pods_whose_service_runs_on_a_device_ask_for_one(name: str) -> None:
    """Draft heads run on the CPU, and no drafter has a flag for a device."""
    for pod in services_of(render(name)):
        settings = dict(given(name, pod)) if pod.tier in TIERS else {}
        resources = pod.main.get("resources", {})
        has_device = any("nvidia.com/gpu" in resources.get(kind, {}) for kind in ("requests", "limits"))
        assert has_device == (settings.get("device", "cpu") != "cpu"), pod.owner


def memory_bytes(text: str) -> int:
    return int(text[:-2]) * {"Mi": 1 << 20, "Gi": 1 << 30}[text[-2:]]


@pytest.mark.parametrize("name", ["base", "overlays/local-cpu"])
def test_an_engine_pod_asks_for_the_memory_that_the_planner_gives_its_worker(name: str) -> None:
    shape = read_shape(DEFAULT_MODEL)
    for pod in services_of(render(name)):
        if pod.tier not in ("prefill", "decode"):
            continue
        resources, stated = pod.main["resources"], dict(given(name, pod))
        request, limit = (memory_bytes(resources[kind]["memory"]) for kind in ("requests", "limits"))
        memory = int(stated.get("memory_bytes", limit // 2))  # the default of a worker in a container
        batch = int(stated.get("max_batch", rows(EngineSettings)["max_batch"].default))
        kv = kv_cache_bytes(shape, HostMemory(memory), max_batch=batch)
        assert kv >= shape.max_context_tokens * shape.kv_token_bytes, "one whole context"
        assert shape.weights_bytes + 1.5 * kv + PROCESS_OVERHEAD_BYTES <= memory, pod.owner
        # A laptop's cluster asks for less: pages take memory when they are first used.
        assert memory <= (request if name == "base" else limit), pod.owner


def test_a_flag_that_does_not_exist_is_found() -> None:
    known = rows(RouterSettings)
    assert "kv_memory_bytes" not in known and "tensor_parallel" not in rows(DecodeSettings)
    with pytest.raises(ValueError, match="HOST:PORT"):
        check_value(known["listen"], "0.0.0.0")
    with pytest.raises(ValueError, match="transport"):
        check_value(rows(EngineSettings)["transport"], "pigeon")
