"""Advertised addresses."""

from __future__ import annotations

import pytest

from libs.common.rpc.access import AccessControl
from libs.common.rpc.endpoints import advertised_endpoint, endpoint_beside
from libs.common.rpc.serve import ServiceHost
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.hosts import host_of, is_wildcard

SECRET = ClusterSecret(b"a secret that is long enough for a test of addresses")


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("", "0.0.0.0:7123"),
        ("10.0.0.7:7000", "10.0.0.7:7000"),
        ("10.0.0.7:0", "10.0.0.7:7123"),
        ("decode-0.workers:7000", "decode-0.workers:7000"),
        ("[fd00::7]:0", "[fd00::7]:7123"),
    ],
)
def test_the_advertised_address_replaces_the_bound_one(advertise: str, expected: str) -> None:
    assert advertised_endpoint("0.0.0.0:7123", advertise) == expected


def test_another_port_of_the_process_has_the_advertised_host_unless_it_has_its_own() -> None:
    assert endpoint_beside("0.0.0.0:9090", "10.0.0.7:7000") == "10.0.0.7:9090"
    assert endpoint_beside("[::]:9090", "[fd00::7]:7000") == "[fd00::7]:9090"
    assert endpoint_beside("127.0.0.1:9090", "10.0.0.7:7000") == "127.0.0.1:9090"
    assert endpoint_beside("127.0.0.1:9090", "10.0.0.7:7000", "metrics.example:80") == "metrics.example:80"
    assert endpoint_beside("0.0.0.0:9090", "10.0.0.7:7000", "10.0.0.8:0") == "10.0.0.8:9090"
    assert host_of("[fd00::7]:7000") == "fd00::7"
    assert is_wildcard("[::]:1") and is_wildcard("0.0.0.0:1") and not is_wildcard("10.0.0.7:1")


async def test_a_server_advertises_its_port_and_warns_of_an_address_that_no_machine_can_dial(
    caplog: pytest.LogCaptureFixture,
) -> None:
    access = AccessControl(secret=SECRET)
    host = ServiceHost("0.0.0.0:0", access=access, advertise="localhost:0")
    assert host.endpoint == f"localhost:{host.port}" and host.port
    assert not caplog.messages
    wild = ServiceHost("0.0.0.0:0", access=access)
    assert wild.endpoint == f"0.0.0.0:{wild.port}"
    assert "--advertise" in caplog.messages[-1]
    for each in (host, wild):
        await each.start([])
        await each.stop(grace_s=0)
