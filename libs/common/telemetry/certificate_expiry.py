"""When this process's certificate ends, read from its PEM file: Python's `ssl` shows it for peers only."""

from __future__ import annotations

import calendar
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.rpc.tls import FilesVersion, files_version

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# Tags of DER: the optional version of a certificate, and the longer of two forms of time.
_VERSION, _LONG_TIME = 0xA0, 0x18


class CertificateExpiry:
    """The gauge of one file, which may be renewed. Without a file it has none."""

    def __init__(self, certificate: Path | None) -> None:
        self._file = certificate
        self._seen: FilesVersion | None = None
        self._figures: dict[str, float] = {}

    def figures(self) -> dict[str, float]:
        """By metric name; of the last readable file while a renewal writes it."""
        if self._file is None:
            return {}
        version = files_version(self._file)
        if version != self._seen:
            self._seen = version
            try:
                end_s = expiry_unix_s(self._file.read_text())
            except (OSError, ValueError):
                return self._figures
            self._figures = {"slipstream_certificate_expires_unix_seconds": end_s}
        return self._figures


def expiry_unix_s(pem: str) -> float:
    """When the first certificate of a PEM file ends. Raises ValueError for what is none."""
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("the file has no certificate")
    try:
        ((_, certificate),) = _elements(ssl.PEM_cert_to_DER_cert(found[0]))
        (_, to_be_signed), *_ = _elements(certificate)
        fields = [value for tag, value in _elements(to_be_signed) if tag != _VERSION]
        # Serial number, signature, issuer, validity: a begin and an end.
        _, (tag, end) = _elements(fields[3])
        form = "%Y%m%d%H%M%SZ" if tag == _LONG_TIME else "%y%m%d%H%M%SZ"
        return float(calendar.timegm(time.strptime(end.decode("ascii"), form)))
    except (IndexError, ValueError):
        raise ValueError("the file's first certificate is malformed") from None


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and value of each element of a DER sequence. Raises IndexError where it ends too early."""
    at = 0
    while at < len(der):
        tag, n_bytes = der[at], der[at + 1]
        at += 2
        if n_bytes >= 0x80:  # the number of bytes of the length
            width = n_bytes - 0x80
            n_bytes = int.from_bytes(der[at : at + width], "big")
            at += width
        if at + n_bytes > len(der):
            raise IndexError
        yield tag, der[at : at + n_bytes]
        at += n_bytes
