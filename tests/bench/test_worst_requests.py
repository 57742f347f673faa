"""Every kind of worst request is of a path or method whose parser the benchmark of holds knows."""

from __future__ import annotations

import contextlib

import pytest

from bench.worst_requests import bodies, messages
from bench.worst_requests.parsers import PARSERS
from slipstream import bounds
from slipstream.errors import SlipstreamError


@pytest.mark.parametrize("name", [name for name in bodies.KINDS if name.startswith(("/v1/", "run,", "/det"))])
def test_bodies_of_other_apis_are_read_or_refused(name: str) -> None:
    request = bodies.KINDS[name]()
    assert len(request.body) <= bounds.MAX_BODY_BYTES
    with contextlib.suppress(SlipstreamError):
        PARSERS[request.path](request.body)


@pytest.mark.parametrize("name", [name for name in messages.KINDS if "ids" in name or "Jobs" in name])
def test_messages_of_many_numbers_or_jobs_are_read_or_refused(name: str) -> None:
    request = messages.KINDS[name]()
    assert len(request.message) <= bounds.MAX_BODY_BYTES
    with contextlib.suppress(SlipstreamError):
        PARSERS[request.method](request.message)
