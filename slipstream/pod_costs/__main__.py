"""`python -m slipstream.pod_costs`: write pods' deletion costs until SIGTERM, in a pod of the cluster."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.credentials.secret_files import exposure
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.logs.lines import LOG_FORMATS, LineFormat, RecordFormatter
from slipstream.pod_costs.health_port import health_port
from slipstream.pod_costs.kube_api import SERVICE_ACCOUNT, KubeAddress
from slipstream.pod_costs.writer import PodCostWriter
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import Dial
from slipstream.rpc.hosts import address_of
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.tls import TlsFiles

SERVICE = "pod-costs"
INSTANCE = SERVICE  # in the routers' logs
LOG_FORMAT_VARIABLE = "SLIPSTREAM_LOG_FORMAT"  # of the services
STUCK_S = 300.0  # a round takes a few time-outs of 5 and 10 s


def _address(text: str) -> tuple[str, int]:
    try:
        return address_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _endpoint(text: str) -> str:
    _address(text)
    return text


def _interval_s(text: str) -> float:
    if not text.isdecimal() or not 1 <= int(text) <= 3600:
        raise argparse.ArgumentTypeError(f"must be 1 to 3600 seconds, not {text!r}")
    return float(text)


def _log_format(text: str) -> str:
    if text not in LOG_FORMATS:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(LOG_FORMATS)}, not {text!r}")
    return text


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(prog="python -m slipstream.pod_costs", allow_abbrev=False)
    made.add_argument("--router", type=_endpoint, required=True, help="HOST:PORT of routers' gRPC admin port")
    made.add_argument("--admin-http", type=_address, required=True, help="HOST:PORT for the probes")
    made.add_argument("--every-s", type=_interval_s, default=15.0, help="seconds between two rounds")
    made.add_argument("--cluster-secret-file", type=Path, help="the cluster's secret")
    made.add_argument("--tls-ca", type=Path, help="PEM of the CA; with the two below: mTLS")
    made.add_argument("--tls-certificate", type=Path, help="PEM of an operator's certificate")
    made.add_argument("--tls-key", type=Path, help="PEM of its key")
    made.add_argument("--tls-server-name", default="", help="name in the routers' certificates")
    made.add_argument(
        "--service-account", type=Path, default=SERVICE_ACCOUNT, help="folder of token, ca.crt and namespace"
    )
    made.add_argument(
        "--log-format",
        type=_log_format,
        help=f"form of log lines (default: {LOG_FORMAT_VARIABLE}, else {LOG_FORMATS[0]})",
    )
    return made


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags, with what the environment says. Ends the process for a wrong one."""
    made = parser()
    given = made.parse_args(arguments)
    if given.log_format is None:
        try:
            given.log_format = _log_format(os.environ.get(LOG_FORMAT_VARIABLE) or LOG_FORMATS[0])
        except argparse.ArgumentTypeError as error:
            made.error(f"{LOG_FORMAT_VARIABLE}: {error}")
    return given


def configure_logging(log_format: str) -> None:
    """Log to stderr, in the lines of the services."""
    lines = LineFormat(SERVICE, os.environ.get("HOSTNAME", INSTANCE), log_format == "json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter(lines))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def operator_dial(given: argparse.Namespace) -> Dial:
    """Channels with an operator's token, certificate, or both. Raises InvalidArgument."""
    files = (given.tls_ca, given.tls_certificate, given.tls_key)
    if any(files) and not all(files):
        raise InvalidArgument("--tls-ca, --tls-certificate, --tls-key", "go together")
    for flag, file in (
        ("--cluster-secret-file", given.cluster_secret_file),
        ("--tls-key", given.tls_key),
    ):
        if file is not None and (text := exposure(file)):
            logging.warning("%s: %s", flag, text)
    tokens = None
    if given.cluster_secret_file is not None:
        try:
            secret = ClusterSecret.from_file(given.cluster_secret_file)
        except ValueError as error:
            raise InvalidArgument("--cluster-secret-file", str(error)) from None
        tokens = TokenMinter(secret, INSTANCE, CallerClass.OPERATOR)
    return Dial(TlsFiles(*files, given.tls_server_name) if all(files) else None, tokens)


async def serve(given: argparse.Namespace) -> None:
    """Write until SIGTERM or SIGINT. Raises InvalidArgument for wrong flags, OSError for a port in use."""
    every_s: float = given.every_s
    writer = PodCostWriter(
        given.router, operator_dial(given), KubeAddress.of_pod(files=given.service_account)
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)

    def is_alive() -> bool:
        return time.monotonic() - writer.ended_s < STUCK_S + every_s

    with health_port(given.admin_http, is_alive=is_alive, is_ready=lambda: writer.works):
        await writer.run(stopped, every_s=every_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 2 for wrong arguments."""
    given = parse(arguments)
    configure_logging(given.log_format)
    try:
        asyncio.run(serve(given))
    except (SlipstreamError, OSError) as error:
        print(f"pod_costs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
