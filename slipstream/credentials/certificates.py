"""PEM files of certificates and keys: whether they can be used, and from when until when.

Python's `ssl` shows the times of peers' certificates only, so those of our own are read from its DER.
"""

from __future__ import annotations

import calendar
import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from slipstream.credentials.bounded_file import read_bounded
from slipstream.errors import InvalidArgument

# A block ends before the next one begins: else a file of begins alone takes the square of its size.
_BODY = r"(?:(?!-----BEGIN ).)*?"
_PEM = re.compile(f"-----BEGIN CERTIFICATE-----{_BODY}-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(f"-----BEGIN [A-Z ]*PRIVATE KEY-----{_BODY}-----END ", re.DOTALL)
_ENCRYPTED = ("ENCRYPTED ", "Proc-Type: 4,ENCRYPTED")  # of PKCS #8 and of the older form
_MISMATCH = "KEY_VALUES_MISMATCH"
# Tags of DER: the optional version of a certificate, and the longer of two forms of time.
_VERSION, _LONG_TIME = 0xA0, 0x18


class TlsFault(OSError):
    """Files that TLS cannot use. `names`: ca, certificate, key, those that are at fault; `reason` has their
    paths and nothing of their contents."""

    def __init__(self, names: Sequence[str], reason: str) -> None:
        super().__init__(reason)
        self.names, self.reason = tuple(names), reason

    def as_argument(self, flag: Callable[[str], str]) -> InvalidArgument:
        """The error of the settings that name the files; `flag` gives that of a file."""
        return InvalidArgument(", ".join(map(flag, self.names)), self.reason)


def check_pair(certificate: Path, key: Path) -> None:
    """Raises TlsFault for files that are not PEM, an encrypted key, or the key of another certificate."""
    text, key_text = _read("certificate", certificate), _read("key", key)
    if not _PEM.search(text):
        raise TlsFault(["certificate"], f"{certificate} is not PEM with a certificate{_holds_instead(text)}")
    found = _KEY.search(key_text)
    if found is None:
        raise TlsFault(["key"], f"{key} is not PEM with a private key{_holds_instead(key_text)}")
    if any(words in found[0] for words in _ENCRYPTED):
        again = f"`openssl pkey -in {key} -out NEW` writes it without"
        raise TlsFault(["key"], f"{key} is encrypted, and a service asks for no passphrase: {again}")
    try:
        # A passphrase, so that OpenSSL never asks the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        if getattr(error, "reason", None) == _MISMATCH:
            raise TlsFault(["certificate", "key"], f"{key} is not the key of {certificate}") from None
        why = getattr(error, "reason", None) or error.strerror or "is malformed"
        raise TlsFault(["certificate", "key"], f"{certificate} or {key} cannot be used: {why}") from None


def check_authority(ca: Path, name: str = "ca") -> None:
    """Raises TlsFault for a file that is not PEM with certificates."""
    text = _read(name, ca)
    if not _PEM.search(text):
        raise TlsFault([name], f"{ca} is not PEM with a certificate{_holds_instead(text)}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(ca)
    except OSError as error:
        why = getattr(error, "reason", None) or error.strerror or "is malformed"
        raise TlsFault([name], f"{ca} cannot be used: {why}") from None


def validity_fault(certificate: Path, *, now_s: float) -> str:
    """What to say of a certificate that has ended or has not begun; empty for every other file."""
    try:
        begin_s, end_s = validity_unix_s(_read("certificate", certificate))
    except (OSError, ValueError):
        return ""
    if begin_s <= now_s < end_s:
        return ""
    verb, time_s = ("begins", begin_s) if now_s < begin_s else ("ended", end_s)
    shown = datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{certificate} {verb} at {shown}: clients and peers refuse it"


def _read(name: str, path: Path) -> str:
    try:
        return read_bounded(path).decode("ascii", "replace")
    except OSError as error:
        raise TlsFault([name], f"{path} cannot be read: {error.strerror}") from None


def _holds_instead(text: str) -> str:
    """What a file without the expected block has, for files that were exchanged."""
    if _PEM.search(text):
        return ": it has a certificate"
    return ": it has a private key" if _KEY.search(text) else ""


def validity_unix_s(pem: str) -> tuple[float, float]:
    """When the first certificate of a PEM file begins and ends. Raises ValueError for what is none."""
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("the file has no certificate")
    try:
        ((_, certificate),) = _elements(ssl.PEM_cert_to_DER_cert(found[0]))
        (_, to_be_signed), *_ = _elements(certificate)
        fields = [value for tag, value in _elements(to_be_signed) if tag != _VERSION]
        # Serial number, signature, issuer, validity.
        begin, end = _elements(fields[3])
        return _unix_s(*begin), _unix_s(*end)
    except (IndexError, ValueError):
        raise ValueError("the file's first certificate is malformed") from None


def _unix_s(tag: int, time_text: bytes) -> float:
    form = "%Y%m%d%H%M%SZ" if tag == _LONG_TIME else "%y%m%d%H%M%SZ"
    return float(calendar.timegm(time.strptime(time_text.decode("ascii"), form)))


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
