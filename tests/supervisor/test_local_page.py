"""The page of the local cluster: its commands for services by hand work as they stand."""

from __future__ import annotations

import re
import shlex

import pytest

from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import rows
from libs.worker.process.settings import EngineSettings
from services.router.settings import RouterSettings
from supervisor.configuration.cluster_options import ROOT

KINDS: dict[str, type[ServiceSettings]] = {"prefill": EngineSettings, "router": RouterSettings}
PAGE = (ROOT / "deploy" / "local" / "README.md").read_text()
COMMANDS = re.findall(r"(?m)^python -m services\.(\w+) ((?:.*\\\n)*.*)$", PAGE)


@pytest.mark.parametrize(("service", "arguments"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_a_service_by_hand_has_the_flags_of_a_secured_cluster(service: str, arguments: str) -> None:
    given = [word for word in shlex.split(arguments) if word.startswith("--")]
    known = {row.flag for row in rows(KINDS[service]).values()}
    assert set(given) <= known
    assert {"--cluster-secret-file", "--tls-ca", "--tls-certificate", "--tls-key", "--etcd"} <= set(given)


def test_the_page_has_such_commands() -> None:
    assert {name for name, _ in COMMANDS} == set(KINDS)
