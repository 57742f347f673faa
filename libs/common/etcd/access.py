"""How a process reaches etcd: endpoints, TLS files, user and password file. All clients are opened here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libs.common.etcd.channel import EtcdTls
from libs.common.etcd.client import EtcdClient
from slipstream.credentials.bounded_file import read_bounded
from slipstream.credentials.certificates import TlsFault
from slipstream.errors import InvalidArgument, Unauthenticated


class EtcdSettings(Protocol):
    """The settings that a service and the supervisor share."""

    @property
    def etcd(self) -> str | None: ...
    @property
    def etcd_ca(self) -> Path | None: ...
    @property
    def etcd_certificate(self) -> Path | None: ...
    @property
    def etcd_key(self) -> Path | None: ...
    @property
    def etcd_user(self) -> str: ...
    @property
    def etcd_password_file(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """One etcd cluster. `endpoints` is HOST:PORT[,HOST:PORT..]; empty for none."""

    endpoints: str = ""
    tls: EtcdTls | None = None
    user: str = ""
    password_file: Path | None = None

    @classmethod
    def of(cls, settings: EtcdSettings) -> EtcdAccess:
        """Raises InvalidArgument for settings or files that do not go together."""
        if (settings.etcd_certificate is None) != (settings.etcd_key is None):
            raise InvalidArgument("--etcd-certificate, --etcd-key", "go together")
        if settings.etcd_certificate is not None and settings.etcd_ca is None:
            raise InvalidArgument("--etcd-ca", "is needed with --etcd-certificate")
        if bool(settings.etcd_user) != (settings.etcd_password_file is not None):
            raise InvalidArgument("--etcd-user, --etcd-password-file", "go together")
        tls = None
        if settings.etcd_ca is not None:
            tls = EtcdTls(settings.etcd_ca, settings.etcd_certificate, settings.etcd_key)
        if tls is not None and settings.etcd:
            try:
                tls.check()
            except TlsFault as fault:
                raise fault.as_argument("--etcd-{}".format) from None
        return cls(settings.etcd or "", tls, settings.etcd_user, settings.etcd_password_file)

    @property
    def is_plain(self) -> bool:
        """Whether etcd is reached without TLS and without a user."""
        return self.tls is None and not self.user

    def open(self, *, timeout_s: float = 3.0) -> EtcdClient:
        """A client, which the caller closes."""
        return EtcdClient(
            self.endpoints.split(","),
            tls=self.tls,
            user=self.user or None,
            password=self._password,
            timeout_s=timeout_s,
        )

    def _password(self) -> str:
        """Read at each login, so that a changed file counts. Its text never appears in an error."""
        assert self.password_file is not None
        try:
            return read_bounded(self.password_file).decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            raise Unauthenticated(f"etcd: {self.password_file} cannot be read: {reason}") from None
