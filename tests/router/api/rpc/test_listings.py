"""ListSessions of a tenant with many sessions: all of its own, made off the router's event loop."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from services.router.request.model_card import ModelCard
from slipstream.rpc.dial import dial
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

N_SESSIONS = 3000


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
        answer = await stub.ListSessions(
            router_pb2.ListSessionsRequest(), metadata=(("authorization", "Bearer key-a"),)
        )
    assert {each.tenant for each in answer.sessions} == {"anna"}
    assert {each.session for each in answer.sessions} == {f"s-{n}" for n in range(N_SESSIONS)}
    assert len(answer.sessions) == N_SESSIONS == made.total()
    one = answer.sessions[0]
    assert (one.prefill_worker, one.decode_worker, one.kvstore, one.blocks) == ("p", "d", "k", 1)
    assert one.tail_hash == b"x" * 16 and one.epoch > 0
    assert made[threading.get_ident()] == 0
