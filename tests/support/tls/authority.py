"""Certificates of tests: an authority that signs for 127.0.0.1, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.rpc.tls import TlsFiles

# Services read it like an RSA key, and openssl makes it without a search for primes.
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


class Authority:
    """A new CA in a directory. Tests that need one are skipped where openssl is missing."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs the openssl command")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.ca, self._key = directory / "ca.pem", directory / "ca.key"
        _openssl("req", "-x509", *_NEW_KEY, "-nodes", "-subj", "/CN=tests", "-days", "2",
                 "-keyout", self._key, "-out", self.ca)  # fmt: skip

    def issue(self, name: str, *hosts: str) -> TlsFiles:
        """A certificate with the common name `name` for both ends of connections to 127.0.0.1 and `hosts`."""
        key, asked = self._directory / f"{name}.key", self._directory / f"{name}.csr"
        certificate, extension = self._directory / f"{name}.pem", self._directory / f"{name}.ext"
        subjects = ",".join(
            ("subjectAltName=IP:127.0.0.1", *(f"DNS:{host}" for host in ("localhost", *hosts)))
        )
        extension.write_text(f"{subjects}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", *_NEW_KEY, "-nodes", "-subj", f"/CN={name}", "-keyout", key,
                 "-out", asked)  # fmt: skip
        _openssl("x509", "-req", "-in", asked, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial",
                 "-days", "2", "-extfile", extension, "-out", certificate)  # fmt: skip
        return TlsFiles(self.ca, certificate, key)


def install(source: TlsFiles, target: TlsFiles) -> None:
    """Replace the files of `target` by those of `source`, each one atomically, as tools that renew do."""
    for new, old in (
        (source.ca, target.ca),
        (source.certificate, target.certificate),
        (source.key, target.key),
    ):
        temporary = old.with_suffix(".new")
        temporary.write_bytes(new.read_bytes())
        temporary.replace(old)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
