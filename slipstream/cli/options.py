"""Flags that several commands share: the run directory, JSON output, mutual TLS."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import InvalidArgument

if TYPE_CHECKING:
    from slipstream.rpc.tls import TlsFiles

RunDir = Annotated[Path, typer.Option(help="Directory of the cluster's state, logs and data.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
TlsCa = Annotated[
    Path | None, typer.Option(envvar="SLIPSTREAM_TLS_CA", help="PEM of the CA; with the two below: mTLS.")
]
TlsCertificate = Annotated[
    Path | None, typer.Option(envvar="SLIPSTREAM_TLS_CERTIFICATE", help="PEM of this client's certificate.")
]
TlsKey = Annotated[Path | None, typer.Option(envvar="SLIPSTREAM_TLS_KEY", help="PEM of its key.")]

ClusterSecretFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SLIPSTREAM_CLUSTER_SECRET_FILE",
        help="File with the cluster's secret; default: that of the cluster in --run-dir.",
    ),
]


def check_endpoints(endpoints: Iterable[str]) -> None:
    """Raises InvalidArgument for a value of --endpoint that is not host:port."""
    for endpoint in endpoints:
        host, _, port = endpoint.strip().rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidArgument("--endpoint", f"must be host:port, not {endpoint!r}")


def tls_from(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """None without any of the three. Raises InvalidArgument for one or two, and for what cannot be read."""
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise InvalidArgument("--tls-ca, --tls-certificate, --tls-key", "go together")
    for flag, file in (("--tls-ca", ca), ("--tls-certificate", certificate), ("--tls-key", key)):
        try:
            with file.open("rb") as opened:
                opened.read(1)
        except OSError as error:
            raise InvalidArgument(flag, f"cannot be read: {error.strerror}") from None
    from slipstream.rpc.tls import TlsFiles

    files = TlsFiles(ca, certificate, key)
    try:
        files.check()
    except OSError as error:
        reason = f"cannot be used together: {error.strerror or error}"
        raise InvalidArgument("--tls-ca, --tls-certificate, --tls-key", reason) from None
    return files
