"""ListSessions: pages of the caller's own sessions, made off the router's event loop."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import grpc
import pytest

from services.router.request.model_card import ModelCard
from slipstream.errors import InvalidArgument
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

N_SESSIONS = 3000
KEY_A = (("authorization", "Bearer key-a"),)


async def test_many_sessions_are_listed_by_threads(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[int] = Counter()
    make = router_pb2.SessionPlacement

    def counted(**fields: Any) -> router_pb2.SessionPlacement:
        made[threading.get_ident()] += 1
        return make(**fields)

    keys = tenant_keys({"key-a": "anna", "key-b": "bert"})
    async with open_router(cluster, card, keys=keys) as router, dial(router.host.endpoint) as channel:
        sessions = router.manager.context.sessions
        for n in range(N_SESSIONS):
            for tenant in ("anna", "bert"):
                sessions.record(tenant, f"s-{n}", prefill="p", decode="d", kvstore="k", hashes=[b"x" * 16])
        monkeypatch.setattr(router_pb2, "SessionPlacement", counted)
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.ListSessionsRequest(limit=700)
        shown: list[router_pb2.SessionPlacement] = []
        while not shown or request.after:
            page = await stub.ListSessions(request, metadata=KEY_A)
            assert len(page.sessions) <= request.limit
            shown += page.sessions
            request.after = page.next
        first = await stub.ListSessions(router_pb2.ListSessionsRequest(), metadata=KEY_A)
        monkeypatch.setattr(router_pb2, "SessionPlacement", make)
    assert {each.tenant for each in shown} == {"anna"}
    assert [each.session for each in shown] == sorted([f"s-{n}" for n in range(N_SESSIONS)])
    assert list(first.sessions) == shown[:100]
    one = shown[0]
    assert (one.prefill_worker, one.decode_worker, one.kvstore, one.blocks) == ("p", "d", "k", 1)
    assert one.tail_hash == b"x" * 16 and one.epoch > 0
    assert made.total() == N_SESSIONS + 100 and made[threading.get_ident()] == 0


@pytest.mark.parametrize(
    ("field", "given"), [("limit", 1001), ("after", "s-1"), ("after", "/slipstream/v1/sessions/a")]
)
async def test_a_page_that_cannot_be_is_refused(
    cluster: FakeCluster, card: ModelCard, field: str, given: Any
) -> None:
    async with open_router(cluster, card) as router, dial(router.host.endpoint) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListSessions(router_pb2.ListSessionsRequest(**{field: given}))
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidArgument) and error.field == field
