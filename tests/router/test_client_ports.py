"""Ports of clients beyond loopback: they need API keys, and a warning says that HTTP is plain."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from services.router.api.api_keys import ApiKeys
from services.router.options import RouterOptions
from services.router.ports import check_clients_addresses
from slipstream.credentials.api_key_file import add_key, read_keys
from slipstream.errors import InvalidArgument
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.tls import TlsFiles

TLS = TlsFiles(Path("ca"), Path("certificate"), Path("key"))
OPEN = RouterOptions("router-0")
SECRET = ClusterSecret(b"a secret of this test, long enough")


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    path = tmp_path / "keys.toml"
    add_key(path, name="anna", tenant="anna")
    return ApiKeys(read_keys(path))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:9000", "node-7:9000"])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_port_without_keys_is_on_loopback(address: str, secret: ClusterSecret | None) -> None:
    options = replace(OPEN, secret=secret)
    for flag, beyond in (
        ("--listen", replace(options, listen=address)),
        ("--http", replace(options, http=address)),
    ):
        with pytest.raises(InvalidArgument, match="it needs --api-keys") as caught:
            check_clients_addresses(beyond)
        assert caught.value.field == flag
    check_clients_addresses(options)


def test_certificates_close_grpc_and_not_http(keys: ApiKeys) -> None:
    options = replace(OPEN, tls=TLS)
    check_clients_addresses(replace(options, listen="0.0.0.0:0"))
    with pytest.raises(InvalidArgument, match="--http"):
        check_clients_addresses(replace(options, http="0.0.0.0:0"))
    check_clients_addresses(replace(options, http="0.0.0.0:0", keys=keys))


@pytest.mark.parametrize(
    ("http", "tls", "warns"),
    [("0.0.0.0:0", None, True), ("0.0.0.0:0", TLS, False), ("127.0.0.1:0", None, False)],
)
def test_keys_over_plain_http_are_warned_of(
    http: str, tls: TlsFiles | None, warns: bool, keys: ApiKeys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_clients_addresses(replace(OPEN, keys=keys, http=http, tls=tls))
    assert any("pass in clear" in record.message for record in caplog.records) == warns
