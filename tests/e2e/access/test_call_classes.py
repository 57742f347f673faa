"""Every method of every running service, with no credential, a tenant's, a peer's and an operator's."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from libs.common.rpc.access_table import HEALTH_SERVICE, REFLECTION_SERVICE, RPC_CLASSES
from slipstream.cluster_record import ProcessRecord
from slipstream.rpc.caller_class import CallerClass
from tests.common.rpc.test_access_table import contract
from tests.e2e.access.keyed_cluster import PUBLIC_PORT, KeyedCluster, keyed_cluster
from tests.support.clusters.local_cluster import until
from tests.support.fixture_dirs import lasting_dir

PUBLIC_SERVICES = {
    *("slipstream.v1.RouterService", "slipstream.v1.JobService", HEALTH_SERVICE),
    *("slipstream.v1.BatchService", "slipstream.v1.ResponseService"),
}
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def keyed(request: pytest.FixtureRequest) -> Iterator[KeyedCluster]:
    with lasting_dir(request, "keyed") as run_dir, keyed_cluster(run_dir) as running:
        yield running


def methods_of(keyed: KeyedCluster, port: str) -> dict[str, list[str]]:
    """The methods of a port's services in their order, as its reflection names them to an operator."""
    if port == PUBLIC_PORT:  # it has no reflection
        known = contract()
        return {service: known[service] for service in PUBLIC_SERVICES}
    with grpc.insecure_channel(keyed.ports()[port]) as channel:
        token = keyed.metadata(CallerClass.OPERATOR, port)
        database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, _Adding(token)))
        pool = DescriptorPool(database)
        return {
            service: [method.name for method in pool.FindServiceByName(service).methods]
            for service in database.get_services()
        }


class _Adding(grpc.StreamStreamClientInterceptor):
    """Adds metadata to the reflection client's calls."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, continuation, details, requests):  # type: ignore[no-untyped-def]
        return continuation(details._replace(metadata=self._metadata), requests)


def expected_status(needed: CallerClass, kind: CallerClass, *, knows_keys: bool) -> grpc.StatusCode | None:
    """The refusal of a call; None where it is admitted."""
    if needed is CallerClass.PUBLIC or kind in (needed, CallerClass.OPERATOR):
        return None
    if kind is CallerClass.PUBLIC or (kind is CallerClass.TENANT and not knows_keys):
        return grpc.StatusCode.UNAUTHENTICATED
    return grpc.StatusCode.PERMISSION_DENIED


def test_every_method_admits_the_callers_of_its_class_only(keyed: KeyedCluster) -> None:
    found: dict[str, set[str]] = {}
    wrong: list[str] = []
    for port in keyed.ports():
        for service, methods in sorted(methods_of(keyed, port).items()):
            found.setdefault(service, set()).update(methods)
            for method in methods:  # Undrain follows Drain
                needed = RPC_CLASSES.get(service, {}).get(method)
                if needed is None:
                    wrong.append(f"{port}: {service}/{method} has no class")
                    continue
                for kind in CallerClass:
                    status = keyed.call(port, f"/{service}/{method}", kind=kind)
                    expected = expected_status(needed, kind, knows_keys=port.startswith("router"))
                    if (status if status in REFUSED else None) is not expected:
                        wrong.append(f"{port}: {method} by {kind}: {status}, not {expected}")
    assert not wrong, "\n".join(wrong)
    assert found == {service: set(methods) for service, methods in RPC_CLASSES.items()}
    # All were drained and undrained on the way.
    until(
        lambda: not any(keyed.cluster.status(name).load.draining for name in keyed.cluster.workers), what="-"
    )
    with keyed.client() as client:
        assert client.chat(HELLO, max_tokens=4).usage is not None


def test_the_public_port_has_no_method_of_peers_and_operators(keyed: KeyedCluster) -> None:
    for service in set(RPC_CLASSES) - PUBLIC_SERVICES:
        for method in RPC_CLASSES[service]:
            status = keyed.call(PUBLIC_PORT, f"/{service}/{method}", kind=CallerClass.OPERATOR)
            assert status is grpc.StatusCode.UNIMPLEMENTED, (service, method)
    for method in (f"/{REFLECTION_SERVICE}/ServerReflectionInfo", "/slipstream.v1.RouterService/New"):
        assert keyed.call(PUBLIC_PORT, method) is grpc.StatusCode.UNIMPLEMENTED, method


@pytest.mark.parametrize("path", ["/metrics", "/healthz"])
def test_the_public_http_port_has_no_route_of_operators(keyed: KeyedCluster, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{keyed.cluster.http}{path}", timeout=60)
    assert refused.value.code == 404
    with urllib.request.urlopen(f"http://{keyed.cluster.admin_http}{path}", timeout=60) as answer:
        assert answer.status == 200


def test_every_service_counts_malformed_messages(keyed: KeyedCluster) -> None:
    method = "/slipstream.v1.WorkerService/GetStatus"
    processes = [
        process for process in keyed.cluster.supervisor.record().processes if process.has_worker_service
    ]
    assert len(processes) == 5
    for process in processes:
        before = malformed_count(process)
        status = keyed.call(process.instance, method, b"\xff\xff", kind=CallerClass.PEER)
        assert status is grpc.StatusCode.INVALID_ARGUMENT, process.instance
        assert malformed_count(process) == before + 1, process.instance


def malformed_count(process: ProcessRecord) -> float:
    """What a process reports of the messages to its gRPC ports that do not parse."""
    with urllib.request.urlopen(f"http://{process.admin_http}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return float(
        next(line.split()[1] for line in lines if line.startswith("slipstream_grpc_malformed_total "))
    )
