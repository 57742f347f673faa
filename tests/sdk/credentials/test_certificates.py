"""Files of certificates that cannot be used: which of them is named, and with which words."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from libs.common.etcd.access import EtcdAccess
from libs.common.etcd.channel import EtcdTls
from libs.common.runtime.loading import load_settings
from services.router.settings import RouterSettings
from slipstream.cli.options import tls_from
from slipstream.credentials.certificates import TlsFault, validity_fault, validity_unix_s
from slipstream.errors import InvalidArgument
from slipstream.rpc.tls import TlsFiles
from tests.support.tls.authority import Authority


def encrypt(key: Path) -> None:
    """Let the key have a passphrase."""
    subprocess.run(
        ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", f"{key}.new"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    Path(f"{key}.new").replace(key)


def encrypt_in_the_old_form(files: TlsFiles, _: TlsFiles) -> None:
    subprocess.run(
        [
            "openssl",
            "ec",
            "-in",
            str(files.key),
            "-aes256",
            "-passout",
            "pass:secret",
            "-out",
            str(files.key),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert "Proc-Type" in files.key.read_text()


def exchange(files: TlsFiles, _: TlsFiles) -> None:
    certificate, key = files.certificate.read_text(), files.key.read_text()
    files.certificate.write_text(key)
    files.key.write_text(certificate)


def damage(files: TlsFiles, _: TlsFiles) -> None:
    lines = files.certificate.read_text().splitlines()
    files.certificate.write_text("\n".join([*lines[:2], *lines[3:]]))


def mismatch(files: TlsFiles, other: TlsFiles) -> None:
    files.key.write_bytes(other.key.read_bytes())


Break = Callable[[TlsFiles, TlsFiles], object]
NO_CERTIFICATE = "is not PEM with a certificate"
BROKEN: list[tuple[Break, tuple[str, ...], str]] = [
    (mismatch, ("certificate", "key"), "is not the key of"),
    (lambda files, _: files.key.write_bytes(b"\x30\x82\xff"), ("key",), "is not PEM with a private key"),
    (lambda files, _: files.certificate.write_text("x"), ("certificate",), NO_CERTIFICATE),
    (lambda files, _: files.ca.write_text("x"), ("ca",), NO_CERTIFICATE),
    (lambda files, _: files.key.unlink(), ("key",), "cannot be read: No such file"),
    (lambda files, _: encrypt(files.key), ("key",), "is encrypted"),
    (encrypt_in_the_old_form, ("key",), "is encrypted"),
    (exchange, ("certificate",), "it has a private key"),
    (damage, ("certificate", "key"), "cannot be used"),
]


@pytest.mark.parametrize(("break_files", "names", "words"), BROKEN)
def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, break_files: Break, names: tuple[str, ...], words: str
) -> None:
    authority = Authority(tmp_path)
    files, other = authority.issue("one"), authority.issue("other")
    files.check()
    break_files(files, other)
    with pytest.raises(TlsFault, match=words) as found:
        files.check()
    assert found.value.names == names
    assert "BEGIN" not in found.value.reason
    with pytest.raises(InvalidArgument, match=words) as refused:
        tls_from(files.ca, files.certificate, files.key)
    assert refused.value.field == ", ".join(f"--tls-{name}" for name in names)


@pytest.mark.timeout(20)  # the square of the size takes minutes
@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
def test_a_file_of_blocks_that_do_not_end_is_refused_in_a_moment(tmp_path: Path, name: str) -> None:
    files = Authority(tmp_path).issue("one")
    begin = "-----BEGIN PRIVATE KEY-----" if name == "key" else "-----BEGIN CERTIFICATE-----"
    files.paths()[name].write_text(f"{begin}\n" * 10_000)
    with pytest.raises(TlsFault, match="is not PEM with") as found:
        files.check()
    assert found.value.names == (name,)


def settings(files: TlsFiles, **environment: str) -> RouterSettings:
    """A router's settings with these files as flags."""
    return load_settings(
        RouterSettings,
        section="router",
        program="p",
        description="",
        arguments=[
            *("--instance", "r", "--model", ".", "--tls-ca", str(files.ca)),
            *("--tls-certificate", str(files.certificate)),
            *(() if "SLIPSTREAM_TLS_KEY" in environment else ("--tls-key", str(files.key))),
        ],
        environment=environment,
    )


def test_a_service_names_its_settings_by_their_sources(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files, other = authority.issue("one"), authority.issue("other")
    assert settings(files).tls() == files
    with pytest.raises(
        InvalidArgument, match=r"^--tls-certificate, SLIPSTREAM_TLS_KEY: .* is not the key of"
    ):
        settings(files, SLIPSTREAM_TLS_KEY=str(other.key)).tls()
    with pytest.raises(InvalidArgument, match=r"^SLIPSTREAM_TLS_CLIENT_CA: .* it has a private key"):
        settings(files, SLIPSTREAM_TLS_CLIENT_CA=str(other.key)).client_tls()


def test_replaced_files_are_named_by_what_gave_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, clients = Authority(tmp_path / "peers"), Authority(tmp_path / "clients").issue("two")
    files, other = authority.issue("one"), authority.issue("other")
    found = settings(files, SLIPSTREAM_TLS_CLIENT_CA=str(clients.ca)).client_tls()
    assert found is not None and found.may_replace()
    clients.ca.write_text("x")
    assert not found.may_replace()
    assert [record.message for record in caplog.records] == [
        "the old certificate stays in use: SLIPSTREAM_TLS_CLIENT_CA: "
        f"{clients.ca} is not PEM with a certificate"
    ]
    caplog.clear()
    key = tmp_path / "key"
    key.write_bytes(files.key.read_bytes())
    of_peers = settings(files, SLIPSTREAM_TLS_KEY=str(key)).tls()
    assert of_peers is not None and of_peers == replace(files, key=key)
    key.write_bytes(other.key.read_bytes())
    assert not of_peers.may_replace()
    names = "--tls-certificate, SLIPSTREAM_TLS_KEY"
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        f"{names}: {key} is not the key of {files.certificate}"
    ]


def test_a_pair_for_etcd_is_checked_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files, other = authority.issue("one"), authority.issue("other")
    flags = ["--etcd", "a:1", "--etcd-ca", str(files.ca), "--etcd-certificate", str(files.certificate)]
    given = load_settings(
        RouterSettings,
        section="router",
        program="p",
        description="",
        arguments=["--instance", "r", "--model", ".", *flags],
        environment={"SLIPSTREAM_ETCD_KEY": str(other.key)},
    )
    with pytest.raises(InvalidArgument, match="is not the key of") as refused:
        EtcdAccess.of(given)
    assert given.named(refused.value).message.startswith("--etcd-certificate, SLIPSTREAM_ETCD_KEY: ")
    EtcdTls(files.ca, files.certificate, files.key).check()


@pytest.mark.parametrize("verb", ["begins", "ended"])
def test_a_certificate_that_is_not_valid_now_is_said_once(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority(tmp_path).issue("one")
    begin_s, end_s = validity_unix_s(files.certificate.read_text())
    for valid_s in (begin_s, end_s - 1):
        assert validity_fault(files.certificate, now_s=valid_s) == ""
    assert settings(files).tls() == files and not caplog.records
    monkeypatch.setattr("slipstream.rpc.tls.time.time", lambda: begin_s - 1 if verb == "begins" else end_s)
    for _ in range(3):
        assert settings(files).tls() == files
        assert files.may_replace()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and f"{files.certificate} {verb} at 20" in record.message
