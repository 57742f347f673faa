"""Calls of Kubernetes' API before a real HTTPS server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import (
    DataCorrupt,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SlipstreamError,
    Unauthenticated,
    Unavailable,
)
from slipstream.pod_costs.decision import CostedPod, CostWrite
from slipstream.pod_costs.kube_api import ANNOTATION, KubeAddress, kube_session
from tests.sdk.pod_costs.kube_server import PATH, KubeServer, pod
from tests.support.tls.authority import Authority


def test_all_pages_are_read_and_only_pods_of_replica_sets_count(tmp_path: Path) -> None:
    stateful = [{"kind": "StatefulSet", "name": "slipstream-kvstore", "controller": True}]
    server = KubeServer(
        tmp_path,
        pod("prefill", "a", "12"),
        pod("decode", "b"),
        pod("decode", "c", "seven"),
        pod("decode", "ends", "1", deletionTimestamp="2026-11-24T00:00:00Z"),
        pod("kvstore", "kvstore-0", ownerReferences=stateful),
        pod("decode", "bare", ownerReferences=None),
        pod("decode", "theirs", labels={"app.kubernetes.io/component": "decode"}),
        pod("decode", "d", "-3"),
    )
    with server.serving() as address, kube_session(address) as session:
        found = session.pods()
    assert found == [
        CostedPod("prefill", "a", "uid-a", 12),
        CostedPod("decode", "b", "uid-b"),
        CostedPod("decode", "c", "uid-c"),
        CostedPod("decode", "d", "uid-d", -3),
    ]
    assert server.calls == [("GET", PATH)] * 4


def test_a_write_changes_the_annotation_of_that_very_pod(tmp_path: Path) -> None:
    server = KubeServer(tmp_path, pod("decode", "a", "1"))
    with server.serving() as address, kube_session(address) as session:
        session.write(CostWrite(CostedPod("decode", "a", "uid-a"), 31))
        with pytest.raises(FailedPrecondition, match="422"):
            session.write(CostWrite(CostedPod("decode", "a", "another"), 40))
        with pytest.raises(NotFound):
            session.write(CostWrite(CostedPod("decode", "gone", "x"), 40))
        assert [each.cost for each in session.pods()] == [31]  # the connection goes on
    assert server.pods["a"]["annotations"] == {"a": "b", ANNOTATION: "31"}
    assert server.calls[:3] == [("PATCH", f"{PATH}/a"), ("PATCH", f"{PATH}/a"), ("PATCH", f"{PATH}/gone")]


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, Unauthenticated), (403, PermissionDenied), (409, FailedPrecondition), (429, Unavailable),
     (500, Unavailable), (302, Unavailable)],
)  # fmt: skip
def test_refusals_are_typed(tmp_path: Path, status: int, error: type[SlipstreamError]) -> None:
    server = KubeServer(tmp_path, pod("decode", "a"))
    server.forced["GET"] = status
    with (
        server.serving() as address,
        kube_session(address) as session,
        pytest.raises(error, match=str(status)),
    ):
        session.pods()


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"items": [1], "metadata": {}}', b"{}", b"[" * 100_000])
def test_an_answer_that_is_no_list_of_pods_is_refused(tmp_path: Path, raw: bytes) -> None:
    server = KubeServer(tmp_path)
    server.raw = raw
    with server.serving() as address, kube_session(address) as session, pytest.raises(DataCorrupt):
        session.pods()


def test_an_answer_beyond_the_bound_is_not_read_on(tmp_path: Path) -> None:
    server = KubeServer(tmp_path)
    server.raw = b" " * (9 << 20)
    refused = pytest.raises(DataCorrupt, match="exceeds")
    with server.serving() as address, kube_session(address) as session, refused:
        session.pods()


def test_a_list_without_end_ends(tmp_path: Path) -> None:
    server = KubeServer(tmp_path)
    server.raw = b'{"items": [], "metadata": {"continue": "0"}}'
    refused = pytest.raises(FailedPrecondition, match="more than 4000")
    with server.serving() as address, kube_session(address) as session, refused:
        session.pods()


def test_a_server_of_another_authority_gets_no_token(tmp_path: Path) -> None:
    server = KubeServer(tmp_path, pod("decode", "a"))
    other = Authority(tmp_path / "other").ca
    refused = pytest.raises(Unavailable, match=r"(?i)certificate")
    with server.serving() as address, kube_session(replace(address, ca=other)) as session, refused:
        session.pods()
    assert server.calls == []


def test_a_token_that_rotated_is_read_again(tmp_path: Path) -> None:
    server = KubeServer(tmp_path, pod("decode", "a"))
    with server.serving() as address:
        server.token = "second"
        with kube_session(address) as session, pytest.raises(Unauthenticated):
            session.pods()
        server.give_token("second\n")
        with kube_session(address) as session:
            assert len(session.pods()) == 1


@pytest.mark.parametrize("text", ["", "two tokens", "a\r\nX-Injected: b"])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, text: str) -> None:
    server = KubeServer(tmp_path)
    server.give_token(text)
    with server.serving() as address, pytest.raises(Unauthenticated, match="token"), kube_session(address):
        pass
    (tmp_path / "token").unlink()
    with pytest.raises(Unauthenticated, match="No such file"), kube_session(address):
        pass
    assert server.calls == []


def test_outside_of_a_pod_it_says_so(tmp_path: Path) -> None:
    here = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    for environment in ({}, {**here, "KUBERNETES_SERVICE_PORT": "x"}):
        with pytest.raises(InvalidArgument, match="KUBERNETES_SERVICE_HOST"):
            KubeAddress.of_pod(environment, tmp_path)
    (tmp_path / "namespace").write_text("../secrets")
    with pytest.raises(InvalidArgument, match="namespace"):
        KubeAddress.of_pod(here, tmp_path)
    (tmp_path / "namespace").write_text("serving\n")
    found = KubeAddress.of_pod(here, tmp_path)
    assert (found.host, found.port, found.namespace) == ("fd00::1", 443, "serving")
