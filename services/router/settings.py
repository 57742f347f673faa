"""Settings of a router."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from libs.common.api_bounds import RESPONSE_TTL_S
from libs.common.cluster.placements import SESSION_TTL_S
from libs.common.runtime.config_file import files_of
from libs.common.runtime.process_settings import ServiceSettings
from libs.common.runtime.settings import check_address, check_advertised, check_readable, setting
from libs.common.service_bounds import MAX_RUNNING_JOBS, MAX_RUNNING_REQUESTS
from libs.common.worker_bounds import MAX_PROCESS_WAIT_S
from libs.database.database import check_database_url, has_password
from services.router.autoscale.settings import parse_aims, parse_limits
from services.router.jobs.types import LONGEST_WAIT_S
from services.router.jobs.webhooks.policy import parse_webhook_hosts
from slipstream.credentials.certificates import TlsFault, check_authority
from slipstream.credentials.secret_files import exposure
from slipstream.errors import InvalidArgument
from slipstream.rpc.tls import TlsFiles

log = logging.getLogger(__name__)

# Answers that run at SIGTERM have this long: HTTP clients cannot continue them at another router.
ROUTER_DRAIN_S = 120.0
ACCESS_LOG = ("on", "off")
THINKING = ("model", "on", "off")
_HOST_NAME = re.compile(r"[A-Za-z0-9.-]+")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.:\[\]-]+")


def parse_region_ms(text: str) -> dict[str, float]:
    """`eu=0,us=80` by region. Raises ValueError with the reason."""
    distances: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, _, ms = item.partition("=")
        try:
            distances[name] = float(ms)
        except ValueError:
            distances[name] = math.nan
        if not name or not 0.0 <= distances[name] < 1e6:
            raise ValueError(f"{item!r} is not NAME=MS")
    return distances


def parse_names(text: str) -> list[str]:
    """Host names, without port. Raises ValueError with the reason."""
    return _items(text, _HOST_NAME, "a host name without scheme and port")


def parse_model_names(text: str) -> list[str]:
    """A model's name and its aliases. Raises ValueError with the reason."""
    names = text.split(",")
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(f"{text!r} is not NAME[,ALIAS..] with names that differ")
    if any(name.startswith("-") for name in names):
        raise ValueError(f"{text!r} has a name that begins with -, as a flag does")
    return names


def parse_origins(text: str) -> list[str]:
    """Origins as browsers send them. Raises ValueError with the reason."""
    return _items(text, _ORIGIN, "SCHEME://HOST[:PORT] without a path")


def _items(text: str, form: re.Pattern[str], expected: str) -> list[str]:
    items = list(filter(None, text.split(",")))
    for item in items:
        if item != "*" and not form.fullmatch(item):
            raise ValueError(f"{item!r} is not {expected}, or *")
    return items


@dataclass(frozen=True)
class RouterSettings(ServiceSettings):
    """The settings of a router."""

    listen: str = setting("address of the gRPC server", default="127.0.0.1:7000", check=check_address)
    http: str = setting("address of the HTTP server", default="127.0.0.1:8000", check=check_address)
    allowed_hosts: str = setting(
        "NAME[,NAME..] of the Host header beside addresses and localhost; * = any",
        default="",
        default_text="none where --http is on loopback, else any",
        check=parse_names,
    )
    cors_origins: str = setting(
        "ORIGIN[,ORIGIN..] of web pages that may call; * = any", default="", check=parse_origins
    )
    access_log: str = setting("whether each call has a line in the log", default="on", choices=ACCESS_LOG)
    drain_s: float = setting(
        "seconds that SIGTERM waits for running requests", default=ROUTER_DRAIN_S, most=MAX_PROCESS_WAIT_S
    )
    admin: str = setting(
        "address of the gRPC server of operators and peers",
        default="127.0.0.1:0",
        check=check_address,
    )
    admin_advertise: str = setting(
        "HOST:PORT of --admin that others dial",
        default="",
        default_text="what --admin came to (docs/operations.md)",
        check=check_advertised,
    )
    tls_client_ca: Path | None = setting(
        "PEM of the CA of clients, for the public gRPC port alone",
        default=None,
        default_text="--tls-ca",
        check=check_readable,
    )
    model: Path = setting("checkpoint directory: tokenizer, config, name", check=check_readable)
    served_model_name: str | None = setting(
        "NAME[,ALIAS..] that clients use",
        default=None,
        default_text="the directory's",
        check=parse_model_names,
    )
    thinking: str = setting(
        "default of reasoning; model = as generation_config.json says",
        default="model",
        choices=THINKING,
    )
    region_ms: str = setting(
        "distance of each region, NAME=MS[,NAME=MS..]; 0 for others", default="", check=parse_region_ms
    )
    max_requests: int = setting("requests running at once", default=MAX_RUNNING_REQUESTS, least=1)
    api_keys: Path | None = setting(
        "file of API keys (`slipstream keys`); none = no key needed",
        default=None,
        check=check_readable,
        is_secret=True,
    )
    prices: Path | None = setting(
        "file of prices (docs/metering.md)",
        default=None,
        check=check_readable,
    )
    shared_prefix: Path | None = setting(
        "file of a system prompt whose KV all tenants share; the same for all routers",
        default=None,
        check=check_readable,
    )
    session_ttl_s: int = setting(
        "seconds until an unused session's placement is forgotten",
        default=SESSION_TTL_S,
        least=1,
    )
    database: str | None = setting(
        "sqlite:PATH or postgresql://USER@HOST/NAME, for all routers",
        default=None,
        default_text="none: nothing is stored",
        check=check_database_url,
    )
    jobs_beside_live: int = setting(
        "most jobs beside live requests; 0 = none",
        default=MAX_RUNNING_JOBS,
        least=0,
    )
    jobs_longest_wait_s: float = setting(
        "seconds until a job goes on beside live requests anyway, two at a time",
        default=LONGEST_WAIT_S,
    )
    webhook_hosts: str = setting(
        "NAME[:PORT][@NETWORK][,..] to which webhooks may go (docs/jobs.md)",
        default="",
        default_text="none",
        check=parse_webhook_hosts,
    )
    response_ttl_s: int = setting(
        "seconds until a stored response is forgotten", default=int(RESPONSE_TTL_S), least=1
    )
    processes: int = setting("router processes that share the ports", default=1, least=1)
    allow_requested_prefill: bool = setting("honour x-slipstream-prefill: for demonstrations", default=False)
    autoscale_limits: str = setting(
        "TIER=LEAST:MOST[,..] replicas that autoscaling may recommend, 0:0 = none; the same for all routers",
        default="",
        default_text="1:64 for each tier",
        check=parse_limits,
    )
    autoscale_aims: str = setting(
        "NAME=VALUE[,..] at which a tier has the right size (docs/autoscaling.md); the same for all routers",
        default="",
        check=parse_aims,
    )
    scaler_is_public: bool = setting("KEDA's read-only methods of --admin need no credential", default=False)
    child_of: int = setting(
        "pid of the process that started this one as one of several", default=0, is_hidden=True
    )

    def model_names(self) -> list[str]:
        """The names of --served-model-name; none = the model directory's."""
        return parse_model_names(self.served_model_name) if self.served_model_name else []

    def thinks(self) -> bool | None:
        """The value of --thinking; None = as the model says."""
        return None if self.thinking == "model" else self.thinking == "on"

    def warn_of_exposed_secrets(self) -> None:
        """Warn of exposed files of secrets, and of a configuration file with the password of the database."""
        super().warn_of_exposed_secrets()
        source = self.given_as("database")
        if self.database is None or not has_password(self.database) or not source.startswith("["):
            return
        for file in files_of(Path(self.sources["config"])):
            if text := exposure(file):
                log.warning("%s has a password: %s", source, text)

    def client_tls(self) -> TlsFiles | None:
        """The files of the public gRPC port. Raises InvalidArgument, as `tls` does."""
        tls = self.tls()
        if self.tls_client_ca is None:
            return tls
        if tls is None:
            raise InvalidArgument("--tls-client-ca", "needs --tls-ca, --tls-certificate and --tls-key")
        try:
            check_authority(self.tls_client_ca, "client-ca")
        except TlsFault as fault:
            raise fault.as_argument(tls.given_as) from None
        return replace(tls, ca=self.tls_client_ca, ca_name="client-ca")
