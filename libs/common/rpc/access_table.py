"""The rights of callers: the class of every RPC and of every HTTP route. `docs/security.md` shows it.

A test compares these tables with the contract and with the routes. An RPC without a class is an operator's.
The bound of each RPC's message is here, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from libs.common.batch_bounds import FILE_MESSAGE_BYTES
from libs.common.service_bounds import GRPC_SHORT_REQUEST_BYTES
from slipstream.rpc.caller_class import CallerClass

PUBLIC, TENANT = CallerClass.PUBLIC, CallerClass.TENANT
PEER, OPERATOR = CallerClass.PEER, CallerClass.OPERATOR

HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"

# By service, then by method.
RPC_CLASSES: Mapping[str, Mapping[str, CallerClass]] = {
    "slipstream.v1.RouterService": {
        "Generate": TENANT,
        "Tokenize": TENANT,
        "Detokenize": TENANT,
        "Abort": TENANT,
        "ListModels": TENANT,
        "ListSessions": TENANT,
        "ListWorkers": TENANT,
        "GetUsage": TENANT,
    },
    "slipstream.v1.JobService": {
        "SubmitJobs": TENANT,
        "GetJob": TENANT,
        "ListJobs": TENANT,
        "CancelJobs": TENANT,
        "FollowJobs": TENANT,
    },
    "slipstream.v1.BatchService": {
        "UploadFile": TENANT,
        "GetFile": TENANT,
        "ListFiles": TENANT,
        "DeleteFile": TENANT,
        "DownloadFile": TENANT,
        "CreateBatch": TENANT,
        "GetBatch": TENANT,
        "ListBatches": TENANT,
        "CancelBatch": TENANT,
    },
    "slipstream.v1.ResponseService": {
        "GetResponse": TENANT,
        "ListInputItems": TENANT,
        "CancelResponse": TENANT,
        "DeleteResponse": TENANT,
    },
    "slipstream.v1.PrefillService": {
        "Prefill": PEER,
        "WatchHandoff": PEER,
        "RenewHandoff": PEER,
        "ReleaseHandoff": PEER,
        "AbortPrefill": PEER,
    },
    "slipstream.v1.DecodeService": {"Decode": PEER, "AbortDecode": PEER},
    "slipstream.v1.DrafterService": {"Draft": PEER},
    "slipstream.v1.KvstoreService": {
        "Lookup": PEER,
        "Pins": PEER,
        "Reserve": PEER,
        "Commit": PEER,
        "CancelReservation": PEER,
        "VerifyBlocks": OPERATOR,
        "DropBlocks": OPERATOR,
    },
    "slipstream.v1.KvEventService": {"WatchBlocks": PEER},
    "slipstream.v1.WorkerService": {
        "GetStatus": PEER,
        "WatchLoad": PEER,
        "Drain": OPERATOR,
        "Undrain": OPERATOR,
    },
    "slipstream.v1.AutoscaleService": {"GetRecommendations": OPERATOR},
    "slipstream.v1.FleetService": {"GetFleet": OPERATOR, "CallProcess": OPERATOR},
    # KEDA's. A peer's certificate is the least that one can give it; see also --scaler-is-public.
    "externalscaler.ExternalScaler": {
        "IsActive": PEER,
        "StreamIsActive": PEER,
        "GetMetricSpec": PEER,
        "GetMetrics": PEER,
    },
    HEALTH_SERVICE: {"Check": PUBLIC, "Watch": PUBLIC},
    REFLECTION_SERVICE: {"ServerReflectionInfo": OPERATOR},
}

# By method and path, of the router's public HTTP port.
HTTP_CLASSES: Mapping[str, CallerClass] = {
    "POST /v1/chat/completions": TENANT,
    "POST /v1/completions": TENANT,
    "POST /v1/responses": TENANT,
    "POST /v1/responses/input_tokens": TENANT,
    "POST /v1/responses/{response_id}/cancel": TENANT,
    "GET /v1/responses/{response_id}": TENANT,
    "DELETE /v1/responses/{response_id}": TENANT,
    "GET /v1/responses/{response_id}/input_items": TENANT,
    "POST /v1/messages": TENANT,
    "POST /v1/messages/count_tokens": TENANT,
    "POST /tokenize": TENANT,
    "POST /detokenize": TENANT,
    "GET /tokenizer_info": TENANT,
    "GET /v1/models": TENANT,
    "GET /v1/usage": TENANT,
    "GET /v1/models/{name}": TENANT,
    "GET /healthz/live": PUBLIC,
    "GET /healthz/ready": PUBLIC,
    "GET /health": PUBLIC,
    "GET /ping": PUBLIC,
    "GET /version": PUBLIC,
    "GET /openapi.json": PUBLIC,
    "GET /docs": PUBLIC,
    "POST /v1/files": TENANT,
    "GET /v1/files": TENANT,
    "GET /v1/files/{id}": TENANT,
    "DELETE /v1/files/{id}": TENANT,
    "GET /v1/files/{id}/content": TENANT,
    "POST /v1/batches": TENANT,
    "GET /v1/batches": TENANT,
    "GET /v1/batches/{id}": TENANT,
    "POST /v1/batches/{id}/cancel": TENANT,
    "POST /client/v4/accounts/{account}/ai/v1/chat/completions": TENANT,
    "POST /client/v4/accounts/{account}/ai/v1/completions": TENANT,
    "POST /client/v4/accounts/{account}/ai/v1/responses": TENANT,
    "POST /client/v4/accounts/{account}/ai/v1/embeddings": TENANT,
    "GET /client/v4/accounts/{account}/ai/v1/models": TENANT,
    "POST /client/v4/accounts/{account}/ai/run/{model}": TENANT,
}
SCRAPE_ROUTE = "GET /metrics"
# Of the admin port of every service, and what a router's has beside.
HTTP_SERVICE_CLASSES: Mapping[str, CallerClass] = {
    "GET /healthz/live": PUBLIC,
    "GET /healthz/ready": PUBLIC,
    "GET /healthz/started": PUBLIC,
    SCRAPE_ROUTE: OPERATOR,  # or the scrape token
}
# Of the console: the pages are public, because they hold no data and ask for the key.
_CONSOLE = "/console"
HTTP_ROUTER_CLASSES: Mapping[str, CallerClass] = {
    "GET /healthz": OPERATOR,
    f"GET {_CONSOLE}": PUBLIC,
    f"GET {_CONSOLE}/": PUBLIC,
    f"GET {_CONSOLE}/static/{{path}}": PUBLIC,
    f"GET {_CONSOLE}/api/fleet": OPERATOR,
    f"GET {_CONSOLE}/api/events": OPERATOR,
    f"GET {_CONSOLE}/api/requests": OPERATOR,
    f"GET {_CONSOLE}/api/requests/{{id}}": OPERATOR,
    f"GET {_CONSOLE}/api/cache": OPERATOR,
    f"GET {_CONSOLE}/api/jobs": OPERATOR,
    f"GET {_CONSOLE}/api/jobs/{{id}}": OPERATOR,
    f"POST {_CONSOLE}/api/jobs/{{id}}/cancel": OPERATOR,
    f"POST {_CONSOLE}/api/workers/{{role}}/{{instance}}/drain": OPERATOR,
    f"POST {_CONSOLE}/api/workers/{{role}}/{{instance}}/undrain": OPERATOR,
    f"POST {_CONSOLE}/api/chat": TENANT,  # as /v1/chat/completions
}
HTTP_ADMIN_CLASSES: Mapping[str, CallerClass] = {**HTTP_SERVICE_CLASSES, **HTTP_ROUTER_CLASSES}


def is_console_route(route: str) -> bool:
    """Whether a route of the admin port, as the table names it, belongs to the console."""
    return route.partition(" ")[2].startswith(_CONSOLE)


# As gRPC names methods: "/service/method".
METHOD_CLASSES: Mapping[str, CallerClass] = {
    f"/{service}/{method}": kind
    for service, methods in RPC_CLASSES.items()
    for method, kind in methods.items()
}

# What takes a prompt, bodies, hashes of blocks or another method's message has the bound of its port.
_LONG: dict[str, tuple[str, ...]] = {
    "slipstream.v1.RouterService": ("Generate", "Tokenize", "Detokenize"),
    "slipstream.v1.JobService": ("SubmitJobs",),
    "slipstream.v1.FleetService": ("CallProcess",),
    "slipstream.v1.PrefillService": ("Prefill", "WatchHandoff", "RenewHandoff", "ReleaseHandoff"),
    "slipstream.v1.DecodeService": ("Decode",),
    "slipstream.v1.DrafterService": ("Draft",),
    "slipstream.v1.KvstoreService": (
        *("Lookup", "Pins", "Reserve", "Commit", "CancelReservation", "VerifyBlocks", "DropBlocks"),
    ),
    "slipstream.v1.KvEventService": ("WatchBlocks",),
}
LONG_METHODS = frozenset(f"/{service}/{name}" for service, names in _LONG.items() for name in names)
# UploadFile takes content in pieces; FILE_MESSAGE_BYTES bounds each.
PIECE_METHODS: Mapping[str, int] = {"/slipstream.v1.BatchService/UploadFile": FILE_MESSAGE_BYTES}
SHORT_METHODS = METHOD_CLASSES.keys() - LONG_METHODS - PIECE_METHODS.keys()


def most_request_bytes(method: str) -> int | None:
    """The bound of one message of a method, as "/service/method"; None: that of its port."""
    return GRPC_SHORT_REQUEST_BYTES if method in SHORT_METHODS else PIECE_METHODS.get(method)
