"""Every request to every call of a node gets an answer or a typed error, and reveals no block bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kvstore.service.surface import messages
from tests.kvstore.service.tenant_world import IDS, METHODS, World

REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World()
    yield opened
    opened.close()


WORDS = st.one_of(
    st.sampled_from(["", "x", "é" * 300, "socket", "127.0.0.1:1/" + "00" * 16]),
    st.integers(0, 9).map(lambda n: IDS[n % len(IDS)] if IDS else ""),
)
CALLS = st.sampled_from(list(METHODS.values())).flatmap(
    lambda method: st.tuples(
        st.just(method), st.lists(messages(method.input_type, WORDS), min_size=1, max_size=3)
    )
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(call=CALLS)
def test_every_request_gets_an_answer_or_a_typed_error(
    world: World, call: tuple[MethodDescriptor, list[Any]]
) -> None:
    method, requests = call
    answers = world.ask(method, requests)
    assert not isinstance(answers, grpc.StatusCode) or answers in REFUSALS
    world.end_leases()
