"""Every method of the contract has a bound of its message."""

from __future__ import annotations

from libs.common.rpc.access_table import LONG_METHODS, PIECE_METHODS, SHORT_METHODS, most_request_bytes
from libs.common.service_bounds import GRPC_SHORT_REQUEST_BYTES
from tests.common.rpc.test_access_table import contract

# Their messages have names, filters and numbers: no prompt, body, block or message of another method.
SHORT = {
    "externalscaler.ExternalScaler": ["GetMetricSpec", "GetMetrics", "IsActive", "StreamIsActive"],
    "grpc.health.v1.Health": ["Check", "Watch"],
    "grpc.reflection.v1alpha.ServerReflection": ["ServerReflectionInfo"],
    "slipstream.v1.AutoscaleService": ["GetRecommendations"],
    "slipstream.v1.BatchService": [
        *("CancelBatch", "CreateBatch", "DeleteFile", "DownloadFile", "GetBatch", "GetFile", "ListBatches"),
        "ListFiles",
    ],
    "slipstream.v1.DecodeService": ["AbortDecode"],
    "slipstream.v1.FleetService": ["GetFleet"],
    "slipstream.v1.JobService": ["CancelJobs", "FollowJobs", "GetJob", "ListJobs"],
    "slipstream.v1.PrefillService": ["AbortPrefill"],
    "slipstream.v1.ResponseService": ["CancelResponse", "DeleteResponse", "GetResponse", "ListInputItems"],
    "slipstream.v1.RouterService": ["Abort", "GetUsage", "ListModels", "ListSessions", "ListWorkers"],
    "slipstream.v1.WorkerService": ["Drain", "GetStatus", "Undrain", "WatchLoad"],
}


def test_every_method_of_the_contract_has_a_bound() -> None:
    """The test fails for a method that no list names."""
    methods = {f"/{service}/{name}" for service, names in contract().items() for name in names}
    short = {f"/{service}/{name}" for service, names in SHORT.items() for name in names}
    assert short.isdisjoint(LONG_METHODS)
    assert methods == short | LONG_METHODS | PIECE_METHODS.keys()
    assert PIECE_METHODS.keys().isdisjoint(short | LONG_METHODS)
    assert short == SHORT_METHODS
    assert {most_request_bytes(method) for method in short} == {GRPC_SHORT_REQUEST_BYTES}
    assert {most_request_bytes(method) for method in LONG_METHODS} == {None}
    assert {method: most_request_bytes(method) for method in PIECE_METHODS} == PIECE_METHODS
