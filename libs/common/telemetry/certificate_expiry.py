"""The metric of when this process's certificate ends."""

from __future__ import annotations

from pathlib import Path

from slipstream.credentials.certificates import validity_unix_s
from slipstream.rpc.tls import FilesVersion, files_version


class CertificateExpiry:
    """The gauge of one file, which may be renewed. Without a file it has none."""

    def __init__(self, certificate: Path | None) -> None:
        self._file = certificate
        self._seen: FilesVersion | None = None
        self._figures: dict[str, float] = {}

    def figures(self) -> dict[str, float]:
        """The figures by metric name; those of the last readable file while a renewal writes it."""
        if self._file is None:
            return {}
        version = files_version(self._file)
        if version != self._seen:
            self._seen = version
            try:
                _, end_s = validity_unix_s(self._file.read_text())
            except (OSError, ValueError):
                return self._figures
            self._figures = {"slipstream_certificate_expires_unix_seconds": end_s}
        return self._figures
