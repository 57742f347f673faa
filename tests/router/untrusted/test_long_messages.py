"""Methods that take only names refuse long messages before they parse them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from libs.common.rpc.access_table import SHORT_METHODS
from libs.common.service_bounds import GRPC_SHORT_REQUEST_BYTES
from slipstream.errors import InvalidArgument
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from tests.router.conftest import WAIT_S, open_router
from tests.router.support.fake_cluster import FakeCluster

PUBLIC = (
    *("/slipstream.v1.RouterService/", "/slipstream.v1.JobService/"),
    *("/slipstream.v1.BatchService/", "/slipstream.v1.ResponseService/"),
)
ADMIN = (
    "/slipstream.v1.WorkerService/",
    "/slipstream.v1.AutoscaleService/",
    "/slipstream.v1.FleetService/",
    "/externalscaler.ExternalScaler/",
)


@pytest.mark.parametrize("prefixes", [PUBLIC, ADMIN], ids=["public", "admin"])
async def test_short_methods_of_a_router_refuse_long_messages(
    prefixes: tuple[str, ...], cluster: FakeCluster, card: Any
) -> None:
    async with open_router(cluster, card) as router:
        host = router.host if prefixes is PUBLIC else router.admin
        methods = sorted(method for method in SHORT_METHODS if method.startswith(prefixes))
        assert len(methods) >= 8
        async with dial(host.endpoint) as channel:
            for method in methods:
                call: Any = channel.stream_stream(method)
                # No tag has the number 0: a parser refuses the first byte, in other words.
                for n_bytes, words in (
                    (GRPC_SHORT_REQUEST_BYTES + 1, f"at most {GRPC_SHORT_REQUEST_BYTES} bytes"),
                    (8 << 20, f"at most {GRPC_SHORT_REQUEST_BYTES} bytes"),
                    (GRPC_SHORT_REQUEST_BYTES, "well-formed"),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call(iter([bytes(n_bytes)]), timeout=WAIT_S).read()
                    error = from_rpc_error(refused.value)
                    assert isinstance(error, InvalidArgument), (method, error)
                    assert words in error.message, (method, n_bytes, error.message)
