"""The part of the command line that all processes behind the router share."""

from __future__ import annotations

import argparse
from pathlib import Path

from libs.common.transport.open import TRANSPORT_HELP, transport_text
from slipstream.tls import TlsFiles

DEFAULT_DRAIN_S = 5.0


def process_parser(role: str, description: str) -> argparse.ArgumentParser:
    """Who it is, where it listens and stands, how it moves bytes, how it ends. What it parses to is good for
    `tls_files`."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=description)
    add = parser.add_argument
    add("--instance", required=True, help="name of this process in the cluster, unique in its role")
    add("--listen", default="127.0.0.1:0", help="address of the gRPC server; port 0 = any free one")
    add("--etcd", default="", help="HOST:PORT[,HOST:PORT..] of etcd; empty = do without discovery")
    add("--run-dir", type=Path, default=Path(".run"), help="directory for files of this run")
    add("--region", default="", help="where it stands: KV moves within a region only")
    add("--transport", type=transport_text, default="auto", help=TRANSPORT_HELP)
    add("--tls-ca", type=Path, help="PEM; with the two below: mTLS on gRPC, both ways")
    add("--tls-certificate", type=Path, help="PEM")
    add("--tls-key", type=Path, help="PEM")
    add("--log-level", default="info", help="debug, info, warning or error")
    add("--drain-s", type=float, default=DEFAULT_DRAIN_S, help="how long SIGTERM waits for what runs")
    return parser


def tls_files(options: argparse.Namespace) -> TlsFiles | None:
    """The files that --tls-ca, --tls-certificate and --tls-key name: all three or none. Raises SystemExit
    otherwise."""
    files = (options.tls_ca, options.tls_certificate, options.tls_key)
    if all(file is None for file in files):
        return None
    if any(file is None for file in files):
        raise SystemExit("--tls-ca, --tls-certificate and --tls-key go together")
    return TlsFiles(*files)
