"""The options of a router, apart from the parts that its caller hands in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libs.common import service_bounds
from libs.common.api_bounds import RESPONSE_TTL_S
from libs.database.database import Database
from services.router.api.access_log import AccessLog
from services.router.api.api_keys import ApiKeys
from services.router.autoscale.types import AutoscalePolicy
from services.router.execution.context import RECOVERY_WAIT_S
from services.router.jobs.types import LONGEST_WAIT_S
from services.router.jobs.webhooks.policy import WebhookHosts
from services.router.request.prompt_salts import PromptSalts
from services.router.workers.connection import SILENCE_S
from slipstream import bounds
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How this router runs. Endpoints are host:port; port 0 = any free one."""

    instance: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""  # what others dial; "" = what `listen` came to
    http: str = "127.0.0.1:0"
    admin: str = "127.0.0.1:0"
    admin_advertise: str = ""  # what others dial for `admin`; "" = the host of `advertise`
    admin_http: str = "127.0.0.1:0"
    admin_http_advertise: str = ""  # the same for `admin_http`
    tls: TlsFiles | None = None  # of the admin port, and towards workers
    client_tls: TlsFiles | None = None  # of the public port; None: `tls`
    secret: ClusterSecret | None = None
    server_names: Sequence[str] = ()  # endpoints by which callers dial the ports beside their addresses
    http_tls: bool = True  # HTTP uses the certificate of `tls`, where there is one
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    access_log: AccessLog = field(default_factory=AccessLog)
    keys: ApiKeys = field(default_factory=ApiKeys)
    salts: PromptSalts = field(default_factory=PromptSalts)
    max_requests: int = service_bounds.MAX_RUNNING_REQUESTS
    allow_requested_prefill: bool = False
    region_ms: Mapping[str, float] = field(default_factory=dict)
    share_ports: bool = False  # other router processes listen on the same ports
    database: Database | None = None  # None: nothing is stored; its caller closes it after the router
    response_ttl_s: float = RESPONSE_TTL_S
    recovery_wait_s: float = RECOVERY_WAIT_S
    silence_s: float = SILENCE_S
    body_read_s: float = bounds.BODY_READ_S
    write_stall_s: float = service_bounds.WRITE_STALL_S
    idle_connection_s: float = service_bounds.IDLE_CONNECTION_S
    autoscale: AutoscalePolicy = field(default_factory=AutoscalePolicy)
    scaler_is_public: bool = False
    jobs_beside_live: int = service_bounds.MAX_RUNNING_JOBS
    jobs_longest_wait_s: float = LONGEST_WAIT_S
    webhook_hosts: WebhookHosts = field(default_factory=lambda: WebhookHosts({}))
    prices: Path | None = None

    def peer_tokens(self) -> TokenMinter | None:
        """The minter of this router's tokens towards workers and other routers; None without a secret."""
        return None if self.secret is None else TokenMinter(self.secret, self.instance)
