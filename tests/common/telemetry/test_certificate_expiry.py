"""Begin and end of a certificate are those that openssl prints, and the gauge follows the file."""

from __future__ import annotations

import calendar
import subprocess
import time
from pathlib import Path

import pytest

from libs.common.telemetry.certificate_expiry import CertificateExpiry
from slipstream.credentials.certificates import validity_unix_s
from tests.support.tls.authority import Authority

NAME = "slipstream_certificate_expires_unix_seconds"


def validity_by_openssl(certificate: Path) -> tuple[float, float]:
    command = ["openssl", "x509", "-in", str(certificate), "-noout", "-dates"]
    lines = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    begin, end = (line.partition("=")[2] for line in lines)
    return _unix_s(begin), _unix_s(end)


def _unix_s(date: str) -> float:
    return calendar.timegm(time.strptime(date, "%b %d %H:%M:%S %Y GMT"))


def end_by_openssl(certificate: Path) -> float:
    return validity_by_openssl(certificate)[1]


def certificate(path: Path, days: int) -> Path:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=tests"),
            *("-days", str(days), "-keyout", str(path.with_suffix(".key")), "-out", str(path)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return path


def test_begin_and_end_are_those_of_openssl(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("peer").certificate
    # The second one ends after 2049, which DER writes in another form.
    for file in (issued, certificate(tmp_path / "late.pem", days=36_500)):
        assert validity_unix_s(file.read_text()) == validity_by_openssl(file)
    chain = issued.read_text() + (tmp_path / "late.pem").read_text()
    assert validity_unix_s(f"# a comment\n{chain}") == validity_by_openssl(issued)


def test_the_gauge_follows_a_renewal_and_keeps_its_value_meanwhile(tmp_path: Path) -> None:
    Authority(tmp_path / "needs-openssl")
    file = certificate(tmp_path / "peer.pem", days=1)
    expiry = CertificateExpiry(file)
    first = expiry.figures()[NAME]
    assert first == end_by_openssl(file)
    file.write_text("half of a")
    assert expiry.figures() == {NAME: first}
    file.unlink()
    assert expiry.figures() == {NAME: first}
    assert certificate(file, days=9)
    assert expiry.figures()[NAME] == end_by_openssl(file) > first


def test_what_is_no_certificate_is_refused_or_gives_no_gauge(tmp_path: Path) -> None:
    Authority(tmp_path)
    whole = (tmp_path / "ca.pem").read_text()
    lines = whole.splitlines()
    for broken in ("", "hello", "\n".join([*lines[:4], lines[-1]]), whole.replace(lines[1], "A" * 64)):
        with pytest.raises(ValueError, match="certificate"):
            validity_unix_s(broken)
    (tmp_path / "broken.pem").write_text("hello")
    assert CertificateExpiry(tmp_path / "broken.pem").figures() == {}
    assert CertificateExpiry(None).figures() == {}
