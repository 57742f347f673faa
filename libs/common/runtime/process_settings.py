"""Settings that all services share, and settings of all processes behind the router."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from libs.common.runtime.settings import (
    check_address,
    check_advertised,
    check_peers,
    check_readable,
    parse_endpoints,
    rows,
    setting,
)
from libs.common.transport.open import TRANSPORT_HELP, TransportChoice
from libs.common.worker_bounds import DEFAULT_DRAIN_S, MAX_PROCESS_WAIT_S
from slipstream.credentials.certificates import TlsFault
from slipstream.credentials.secret_files import exposure
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.logs.lines import LOG_FORMATS
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.tls import TlsFiles

log = logging.getLogger(__name__)

SECRET_VARIABLE = "SLIPSTREAM_CLUSTER_SECRET"
LOG_LEVELS = ("debug", "info", "warning", "error")
# Settings by the names of the fields that refuse them, where these differ.
_SETTINGS = {"model_dir": "model", "draft_model_dir": "draft_model"}


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of every service."""

    instance: str = setting("name of this process, unique in its role")
    listen: str = setting("address of the gRPC server", default="127.0.0.1:0", check=check_address)
    admin_http: str = setting(
        "address of the HTTP server of metrics and health",
        default="127.0.0.1:0",
        check=check_address,
    )
    etcd: str = setting("HOST:PORT[,HOST:PORT..] of etcd; none = no discovery", default="", check=check_peers)
    etcd_ca: Path | None = setting("PEM of etcd's CA: TLS to etcd", default=None, check=check_readable)
    etcd_certificate: Path | None = setting(
        "PEM of a certificate for etcd", default=None, check=check_readable
    )
    etcd_key: Path | None = setting("PEM of its key", default=None, check=check_readable, is_secret=True)
    etcd_user: str = setting("user of etcd", default="")
    etcd_password_file: Path | None = setting(
        "file of its password", default=None, check=check_readable, is_secret=True
    )
    advertise: str = setting(
        "HOST:PORT that other processes dial",
        default="",
        default_text="what --listen came to",
        check=check_advertised,
    )
    admin_http_advertise: str = setting(
        "HOST:PORT of --admin-http that others dial",
        default="",
        default_text="what --admin-http came to (docs/operations.md)",
        check=check_advertised,
    )
    run_dir: Path = setting("directory for files of this run", default=Path(".run"))
    tls_ca: Path | None = setting(
        "PEM of the CA: mTLS on gRPC, with the two below", default=None, check=check_readable
    )
    tls_certificate: Path | None = setting(
        "PEM of this process's certificate", default=None, check=check_readable
    )
    tls_key: Path | None = setting("PEM of its key", default=None, check=check_readable, is_secret=True)
    http_tls: bool = setting("HTTPS, if there is --tls-certificate", default=True)
    tls_server_name: str = setting(
        "name in the certificates of all peers",
        default="",
        default_text="the host that is dialled",
    )
    cluster_secret_file: Path | None = setting(
        "file of the cluster's secret",
        default=None,
        check=check_readable,
        is_secret=True,
    )
    server_names: str = setting(
        "HOST:PORT[,HOST:PORT..] further names of this process, in tokens",
        default="",
        check=parse_endpoints,
    )
    log_level: str = setting("lowest level that is logged", default="info", choices=LOG_LEVELS)
    log_format: str = setting("form of log lines", default="text", choices=LOG_FORMATS)
    drain_s: float = setting(
        "seconds that SIGTERM waits for running work", default=DEFAULT_DRAIN_S, most=MAX_PROCESS_WAIT_S
    )
    # By name: the flag, the variable or the key of the file that gave a setting. No setting itself. The path
    # of that file is that of "config".
    sources: Mapping[str, str] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    def named(self, error: SlipstreamError) -> SlipstreamError:
        """The error by the names under which the user gives the settings that it refuses; others unchanged.

        Its field is that of a setting, or the flags of one or several.
        """
        if not isinstance(error, InvalidArgument):
            return error
        known = rows(type(self))
        flags = {row.flag: name for name, row in known.items()}
        fields = error.field.split(", ")
        names = [_SETTINGS.get(field, flags.get(field, field)) for field in fields]
        if not any(name in known for name in names):
            return error
        shown = [self.given_as(n) if n in known else field for n, field in zip(names, fields, strict=True)]
        return type(error)(", ".join(shown), error.reason)

    def tls(self) -> TlsFiles | None:
        """The three files of mutual TLS, or None without any. Says once that the certificate has ended.

        Raises InvalidArgument for one or two of them, and for files that cannot be used together.
        """
        if self.tls_ca is None and self.tls_certificate is None and self.tls_key is None:
            return None
        if self.tls_ca is None or self.tls_certificate is None or self.tls_key is None:
            names = ("tls_ca", "tls_certificate", "tls_key")
            raise InvalidArgument(", ".join(map(self.given_as, names)), "go together")
        files = TlsFiles(
            self.tls_ca,
            self.tls_certificate,
            self.tls_key,
            self.tls_server_name,
            given_as=lambda name: self.given_as(f"tls_{name}".replace("-", "_")),
        )
        try:
            files.check()
        except TlsFault as fault:
            raise fault.as_argument(files.given_as) from None
        files.warn_if_invalid_now()
        return files

    def tls_of_http(self) -> TlsFiles | None:
        """The files of `tls`, whose certificate HTTPS uses; None = HTTP is plain. Raises InvalidArgument."""
        return self.tls() if self.http_tls else None

    def dial(self) -> Dial:
        """Opens channels to peers with this process's certificate and token. Raises InvalidArgument."""
        secret = self.cluster_secret()
        tokens = TokenMinter(secret, self.instance) if secret is not None else None
        return Dial(self.tls(), tokens)

    def given_as(self, name: str) -> str:
        """The flag, the variable or the key of the file that gave a setting; without any, its flag."""
        return self.sources.get(name, rows(type(self))[name].flag)

    def warn_of_exposed_secrets(self) -> None:
        """Log each file of a secret that others may read or change. A process calls it once, at its start."""
        for name, row in rows(type(self)).items():
            file = getattr(self, name) if row.described.is_secret else None
            if file is not None and (text := exposure(file)):
                log.warning("%s: %s", self.given_as(name), text)

    def cluster_secret(self) -> ClusterSecret | None:
        """The secret of --cluster-secret-file or SECRET_VARIABLE, or None. Raises InvalidArgument."""
        name = SECRET_VARIABLE
        try:
            if self.cluster_secret_file is not None:
                name = self.given_as("cluster_secret_file")
                return ClusterSecret.from_file(self.cluster_secret_file)
            text = os.environ.get(SECRET_VARIABLE, "").strip()
            return ClusterSecret(text.encode()) if text else None
        except ValueError as error:
            raise InvalidArgument(name, str(error)) from None


@dataclass(frozen=True)
class TierSettings(ServiceSettings):
    """Further settings of processes behind the router: their region and how they move KV."""

    region: str = setting("region of this process: KV moves within a region only", default="")
    kv_listen: str = setting(
        "HOST:PORT of the socket transport or of Mooncake's probe",
        default="",
        default_text="any free port on the host of --listen",
        check=check_address,
    )
    kv_advertise: str = setting(
        "HOST:PORT of the KV transport that peers dial",
        default="",
        default_text="the host of --advertise",
        check=check_advertised,
    )
    transport: str = setting(TRANSPORT_HELP, default="auto", check=TransportChoice.parse)

    def kv_bind(self) -> str:
        """HOST:PORT on which the KV transport listens."""
        return self.kv_listen or f"{self.listen.rpartition(':')[0]}:0"
