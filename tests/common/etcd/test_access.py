"""A real etcd with TLS, client certificates and users, as the settings of a service reach it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from libs.common.cluster.discovery import EtcdDiscovery
from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.placements import EtcdPlacements
from libs.common.cluster.worker_record import Role, Worker
from libs.common.etcd.access import EtcdAccess
from libs.common.etcd.channel import EtcdTls
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import EtcdRefused, EtcdUnavailable
from libs.common.runtime.process_settings import ServiceSettings
from slipstream.errors import InvalidArgument, Unauthenticated
from slipstream.rpc.tls import TlsFiles
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.tls.authority import Authority, install

WAIT_S = 60.0
PASSWORD = "s3cret-of-etcd"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> TlsFiles:
    """The certificate of our side of a connection, in files of this test."""
    issued = authority.issue("slipstream")
    own = TlsFiles(tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "own.key")
    install(issued, own)
    return own


@contextlib.contextmanager
def running_etcd(authority: Authority, directory: Path) -> Iterator[EtcdProcess]:
    """An etcd that speaks TLS only, asks for certificates, and has a user for one prefix of keys."""
    with EtcdProcess(directory / "etcd", tls=authority.issue("etcd")) as process:
        process.require_users("router", PASSWORD)
        yield process


@pytest.fixture(scope="module")
def etcd(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """The etcd of all tests that leave it as it is."""
    with running_etcd(authority, tmp_path_factory.mktemp("shared")) as process:
        yield process


@pytest.fixture
def access(etcd: EtcdProcess, files: TlsFiles, tmp_path: Path) -> EtcdAccess:
    return access_to(etcd, files, tmp_path)


def access_to(etcd: EtcdProcess, files: TlsFiles, tmp_path: Path) -> EtcdAccess:
    """What the settings of a router give, with a password file of this test."""
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    return EtcdAccess.of(
        ServiceSettings(
            instance="router-0",
            etcd=etcd.endpoint,
            etcd_ca=files.ca,
            etcd_certificate=files.certificate,
            etcd_key=files.key,
            etcd_user="router",
            etcd_password_file=password,
        )
    )


@pytest.fixture
async def client(access: EtcdAccess) -> AsyncIterator[EtcdClient]:
    client = access.open(timeout_s=WAIT_S)
    yield client
    await client.close()


async def test_a_user_with_a_certificate_reaches_the_keys_of_its_role(client: EtcdClient) -> None:
    await client.put("/slipstream/v1/key", b"1")
    found = await client.get("/slipstream/v1/key")
    assert found is not None and found.value == b"1"
    with pytest.raises((EtcdRefused, Unauthenticated), match="permission denied"):
        await client.get("/other/key")


async def test_discovery_and_placements_need_no_other_right(client: EtcdClient) -> None:
    discovery, placements = EtcdDiscovery(client), EtcdPlacements(client)
    await placements.start(timeout_s=WAIT_S)
    try:
        discovery.announce(Worker(Role.DECODE, "decode-0", "127.0.0.1:1", "one", b"f" * 16))
        await discovery.wait_announced(timeout_s=WAIT_S)
        placements.put(SessionId("t", "s"), Placement(decode="decode-0", block_count=1))
        await placements.flush(timeout_s=WAIT_S)
    finally:
        await placements.close()
        await discovery.close()
    assert placements.figures()["slipstream_session_writes_total"] == 1


@pytest.mark.parametrize(
    ("change", "error", "timeout_s"),
    [
        ({"user": "", "password_file": None}, EtcdRefused, WAIT_S),  # the certificate's name is no user
        ({"tls": None}, EtcdUnavailable, 1.0),
        ({"certificate": False}, EtcdUnavailable, 1.0),
    ],
    ids=["no user", "no TLS", "no certificate"],
)
async def test_what_is_missing_is_refused(
    access: EtcdAccess, change: dict[str, object], error: type[Exception], timeout_s: float
) -> None:
    if "certificate" in change:
        assert access.tls is not None
        change = {"tls": EtcdTls(access.tls.ca)}
    stranger = replace(access, **change).open(timeout_s=timeout_s)  # type: ignore[arg-type]
    try:
        with pytest.raises(error):
            await stranger.get("/slipstream/v1/key")
    finally:
        await stranger.close()


async def test_a_wrong_password_is_named_and_a_corrected_file_counts(access: EtcdAccess) -> None:
    assert access.password_file is not None
    access.password_file.write_text("wrong-word")
    client = access.open(timeout_s=WAIT_S)
    try:
        with pytest.raises(Unauthenticated) as refused:
            await client.get("/slipstream/v1/key")
        assert "wrong-word" not in str(refused.value)
        access.password_file.unlink()
        with pytest.raises(Unauthenticated, match="cannot be read"):
            await client.get("/slipstream/v1/key")
        access.password_file.write_text(PASSWORD)
        assert await client.get("/slipstream/v1/none") is None
    finally:
        await client.close()


async def test_a_replaced_certificate_is_used_where_the_old_one_is_refused(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    """Etcd comes back under another authority: the client dials again with what its files have now."""
    with running_etcd(authority, tmp_path) as etcd:
        client = access_to(etcd, files, tmp_path).open(timeout_s=WAIT_S)
        try:
            await client.put("/slipstream/v1/key", b"1")
            other = Authority(tmp_path / "other")
            install(other.issue("slipstream"), files)
            etcd.kill()
            etcd.tls = other.issue("etcd")
            etcd.start()
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        found = await client.get("/slipstream/v1/key")
                        break
                    except EtcdUnavailable:
                        continue
            assert found is not None and found.value == b"1"
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"etcd_certificate": Path("c")}, "--etcd-certificate, --etcd-key"),
        ({"etcd_certificate": Path("c"), "etcd_key": Path("k")}, "--etcd-ca"),
        ({"etcd_user": "u"}, "--etcd-user, --etcd-password-file"),
        ({"etcd_password_file": Path("p")}, "--etcd-user, --etcd-password-file"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        EtcdAccess.of(ServiceSettings(instance="x", etcd="e:1", **settings))  # type: ignore[arg-type]
    assert refused.value.field == field


def test_without_settings_etcd_is_plain() -> None:
    access = EtcdAccess.of(ServiceSettings(instance="x", etcd="e:1,f:1"))
    assert access == EtcdAccess("e:1,f:1") and access.is_plain
