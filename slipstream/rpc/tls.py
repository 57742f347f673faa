"""Mutual TLS from three PEM files, for both ends of every internal connection.

Servers follow their files: a new connection gets the certificate that is there at its handshake, and
connections that are open stay as they are. Channels read the files when they are made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from slipstream.credentials.bounded_file import read_bounded
from slipstream.credentials.certificates import TlsFault, check_authority, check_pair, validity_fault

log = logging.getLogger(__name__)

FilesVersion = tuple[tuple[int, int, int], ...]
_Pem = tuple[bytes, bytes, bytes]  # CA, key, certificate


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """CA that signs all peers, and this process's certificate and key (PEM)."""

    ca: Path
    certificate: Path
    key: Path
    server_name: str = ""  # what servers' certificates are for; "" = the host that is dialled
    ca_name: str = "ca"  # the end of the flag of `ca`; a router has one more, of its clients
    # What gave the file of a name, as a log line says it.
    given_as: Callable[[str], str] = field(default="--tls-{}".format, compare=False, repr=False)

    def paths(self) -> dict[str, Path]:
        """The three files by name."""
        return {"ca": self.ca, "certificate": self.certificate, "key": self.key}

    def server_credentials(self, on_handshake: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """Credentials that require and verify the client's certificate, and follow the files.

        The caller keeps them as long as the server runs: gRPC does not. Threads of gRPC call `on_handshake`
        whenever a handshake begins.
        """
        certificates = ServerCertificates(self, on_handshake)
        # The stubs leave out that a fetcher may return None.
        fetch: Callable[[], Any] = certificates.fetch
        return grpc.dynamic_ssl_server_credentials(
            certificates.configuration(), fetch, require_client_authentication=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials that present our certificate and verify the server's."""
        return grpc.ssl_channel_credentials(*_usable(self))

    def version(self) -> FilesVersion | None:
        """Changes when a file is replaced or written; None while one is missing."""
        return files_version(self.ca, self.certificate, self.key)

    def check(self) -> None:
        """Raises TlsFault, an OSError, for files that are not PEM, or a key of another certificate."""
        check_pair(self.certificate, self.key)
        check_authority(self.ca, self.ca_name)

    def may_replace(self) -> bool:
        """Whether replaced files can be served. Says why not, or that the certificate is not valid now.

        All ports of a process ask, and the log has one line for each reason.
        """
        try:
            self.check()
        except TlsFault as fault:
            names = ", ".join(map(self.given_as, fault.names))
            _say_once(self, logging.ERROR, f"the old certificate stays in use: {names}: {fault.reason}")
            return False
        self.warn_if_invalid_now()
        return True

    def warn_if_invalid_now(self) -> None:
        """Say once that the certificate has ended, or has not begun."""
        if text := validity_fault(self.certificate, now_s=time.time()):
            _say_once(self, logging.WARNING, text)


def files_version(*files: Path | None) -> FilesVersion | None:
    """The inode, time and size of each file that is given; None while one is missing."""
    try:
        found = [file.stat() for file in files if file is not None]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


# What was last said of a certificate, with the files as they were then.
_said: dict[Path, tuple[FilesVersion | None, str]] = {}
_said_lock = threading.Lock()


def _say_once(files: TlsFiles, level: int, text: str) -> None:
    """Log the text, unless it was the last one of this certificate and its files are the same."""
    said = (files_version(files.certificate, files.key), text)
    with _said_lock:
        if _said.get(files.certificate) == said:
            return
        _said[files.certificate] = said
    log.log(level, "%s", text)


# The last files that belonged together, for channels that are made between two writes of a renewal.
_last_usable: dict[TlsFiles, tuple[FilesVersion | None, _Pem]] = {}


def _usable(files: TlsFiles) -> _Pem:
    """Read the files, or take what they held when they last belonged together. Raises OSError if never."""
    version = files.version()
    known = _last_usable.get(files)
    if known is not None and known[0] == version:
        return known[1]
    try:
        files.check()
        pem = read_bounded(files.ca), read_bounded(files.key), read_bounded(files.certificate)
    except OSError:
        if known is None:
            raise
        return known[1]
    _last_usable[files] = (version, pem)
    return pem


class ServerCertificates:
    """The certificates of one server as its files have them. Any thread may call `fetch`."""

    def __init__(self, files: TlsFiles, on_handshake: Callable[[], None] = lambda: None) -> None:
        """Raises OSError for a file that cannot be read."""
        self._files = files
        self._on_handshake = on_handshake
        self._seen = files.version()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The present contents of the files. Raises OSError."""
        pair = (read_bounded(self._files.key), read_bounded(self._files.certificate))
        return grpc.ssl_server_certificate_configuration([pair], read_bounded(self._files.ca))

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration of a handshake where the files changed since the last one; None: as before.

        A certificate and a key that do not belong together, as between two writes, change nothing.
        """
        self._on_handshake()
        version = self._files.version()
        if version == self._seen:
            return None
        self._seen = version
        if not self._files.may_replace():
            return None
        try:
            configuration = self.configuration()
        except OSError:  # a file went away meanwhile: the next handshake reads again
            self._seen = ()
            return None
        if self._files.version() != version:  # a file changed meanwhile: the next handshake reads again
            self._seen = ()
            return None
        log.info("%s: serving the new certificate", self._files.certificate)
        return configuration
