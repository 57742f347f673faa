"""A request leaves nothing to the garbage collector, whose runs take milliseconds."""

from __future__ import annotations

import collections
import gc
import logging
from collections.abc import Iterator

import aiohttp
import pytest

from services.router.api.choices import ChoiceRuns
from services.router.api.http.event_stream import EventStream
from services.router.api.openai.response import ResponseWriter
from services.router.execution.attempts.attempt import WorkerAttempt
from services.router.execution.attempts.hedging import HedgedAttempt
from services.router.execution.generation import GenerationTask
from services.router.execution.request_state import RequestState
from services.router.execution.running_request import RunningRequest
from services.router.server import RouterServer
from services.router.workers.prefill_client import RemotePrefill
from services.router.workers.remote_sequence import RemoteSequence
from slipstream import errors
from tests.router.conftest import HELLO, eventually
from tests.router.support.fake_cluster import FakeCluster

_KINDS = (
    RunningRequest,
    GenerationTask,
    RequestState,
    HedgedAttempt,
    WorkerAttempt,
    RemotePrefill,
    RemoteSequence,
    ResponseWriter,
    EventStream,
    ChoiceRuns,
)


def held() -> collections.Counter[str]:
    return collections.Counter(type(item).__name__ for item in gc.get_objects() if type(item) in _KINDS)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Exempt what the tests before have left: each look at all objects, and each collection, would pass it.

    It stays exempt: to end that would end it for modules and items, too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_logging() -> Iterator[None]:
    """Disable logging: pytest keeps log records with their errors and frames."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("fails", ["before the first token", "after the first token", "never"])
@pytest.mark.parametrize(("stream", "n"), [(True, 1), (False, 1), (True, 2), (False, 2)])
async def test_a_request_leaves_no_reference_cycle(
    router: RouterServer, cluster: FakeCluster, fails: str, stream: bool, n: int
) -> None:
    if fails == "before the first token":
        for prefill in cluster.prefills:
            prefill.fail_before_token = errors.InvalidArgument("prompt", "is not what it was")
    elif fails == "after the first token":
        for decode in cluster.decodes:
            decode.refuse = errors.InvalidArgument("prompt", "is not what it was")
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:

        async def ask() -> None:
            body = {"messages": HELLO, "stream": stream, "max_tokens": 4, "n": n}
            async with http.post("/v1/chat/completions", json=body) as answer:
                text = await answer.text()
            assert ("is not what it was" in text) == (fails != "never")

        await ask()
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(5):
                await ask()
            await eventually(lambda: not router.manager.held)
            await eventually(lambda: not held() - before)
        finally:
            gc.enable()
