"""A whole router in this process, before fake workers: both APIs on real sockets."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster.placements import InMemoryPlacements
from libs.database.database import Database, open_database
from models.bpe import train_tokenizer
from services.router.api.http.event_stream import EventStream
from services.router.api.rpc.write_watch import WriteWatch
from services.router.console import static_files
from services.router.execution.policies.hedge_policy import HedgeLimits, HedgePolicy
from services.router.options import RouterOptions
from services.router.placement.cost_model import PrefillReport
from services.router.placement.worker_models import WorkerModels
from services.router.request.model_card import ModelCard, load_model_card
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.requests import chat_request
from slipstream.v1 import router_pb2
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel, hashed_answer

MAX_CONTEXT_TOKENS = 2048
WAIT_S = 100.0
HELLO = [{"role": "user", "content": "Where is my order?"}]
VOCAB_SIZE = 256 + 100 + 256
CORPUS = (
    "Where is my order? Your order 4711 left the warehouse yesterday, it's on its way.",
    'functions.get_weather:0 {"city": "Paris", "unit": "celsius"} ## Return of functions.get_weather:0',
    "The weather in Paris is sunny and 21 degrees; the weather in Oslo is cold and wet.",
)


@pytest.fixture(scope="session", autouse=True)
def console_files() -> Iterator[None]:
    """Read the files of the console once, not for each router: they do not change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_files, "read_files", functools.cache(static_files.read_files))
        yield


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen time-outs, so that slow workers are not silent and predictions do not expire."""
    for name in (
        "workers.connection.STALE_AFTER_S",
        "workers.connection._STATUS_TIMEOUT_S",
        "execution.dispatcher.PREDICTED_TTL_S",
        "execution.dispatcher.DECODE_HELD_S",
        "execution.attempts.attempt.RELEASE_TIMEOUT_S",
        "execution.attempts.attempt._LAST_DELTA_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"services.router.{name}", WAIT_S)


def lose_patience(router: RouterServer, *, limit_s: float = 0.5) -> None:
    """Limit how long clients over HTTP may leave a response unread, those of running requests included."""
    router._http.generation.write_stall_s = limit_s
    for run in router.manager.running:
        if isinstance(stream := run.sink.direct_writer, EventStream):
            stream._write_stall_s = limit_s
            shorten_timers(stream._cut_off, limit_s)


def shorten_timers(callback: Callable[..., None], limit_s: float) -> int:
    """Reschedule the loop's timers of `callback` to `limit_s`; return their number."""
    loop = asyncio.get_running_loop()
    timers = [timer for timer in list(loop._scheduled) if timer._callback == callback]  # type: ignore[attr-defined]
    for timer in timers:
        loop.call_later(limit_s, callback, *timer._args)
    return len(timers)


def hasten_writes(*, stall_s: float, reset_s: float = WAIT_S) -> int:
    """Limit how long the gRPC answers that are being written may stay unread. Returns their number."""
    loop = asyncio.get_running_loop()
    timers = list(loop._scheduled)  # type: ignore[attr-defined]
    watches = [w for t in timers if isinstance(w := getattr(t._callback, "__self__", None), WriteWatch)]
    for watch in watches:
        watch._stall_s, watch._reset_s = stall_s, reset_s
        watch.cancel()
        watch._check()
    return len(watches)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    train_tokenizer(CORPUS, directory, vocab_size=VOCAB_SIZE)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT_TOKENS}
    (directory / "config.json").write_text(json.dumps({"text_config": config}))
    (directory / "generation_config.json").write_text(json.dumps({"thinking": False}))
    return directory


@pytest.fixture(scope="session")
def card(model_dir: Path) -> ModelCard:
    return load_model_card(model_dir)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """A database in the file router.db."""
    opened = open_database(f"sqlite:{tmp_path}/router.db")
    yield opened
    await opened.close()


@pytest.fixture
def model(card: ModelCard) -> FakeModel:
    letters = [card.tokenizer.encode_text(letter)[0] for letter in "abcdefgh ijklmnop"]
    return FakeModel(hashed_answer(letters, end=card.tokenizer.special_id("<|im_end|>")))


@pytest.fixture
async def cluster(model: FakeModel) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(model) as cluster:
        yield cluster


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard) -> AsyncIterator[RouterServer]:
    async with open_router(cluster, card) as server:
        yield server


class FixedSpeeds(WorkerModels):
    """Worker models that learn nothing, so that placement does not depend on this machine's speed."""

    def observe_prefill(self, worker: str, report: PrefillReport) -> None: ...

    def observe_step(self, worker: str, **_: Any) -> None: ...

    def observe_pull(self, worker: str, **_: Any) -> None: ...


NEVER_HEDGE = HedgeLimits(max_uncached_tokens=-1)


class open_router:
    """Context of a router that sees all workers of the cluster and decides independently of clocks."""

    def __init__(self, cluster: FakeCluster, card: ModelCard, **options: Any) -> None:
        self._cluster = cluster
        self._server = RouterServer(
            card,
            cluster.discovery,
            InMemoryPlacements(),
            RouterOptions(
                **{"instance": "router-0", "silence_s": WAIT_S, "recovery_wait_s": WAIT_S, **options}
            ),
        )
        self._server.fleet.worker_models = FixedSpeeds()
        self._server.manager.context.failover.hedge_policy = HedgePolicy(NEVER_HEDGE)

    async def __aenter__(self) -> RouterServer:
        await self._server.start()
        wanted = sum(worker.announced for worker in self._cluster.workers)
        await eventually(lambda: sum(link.ready for link in self._server.fleet.links()) == wanted)
        return self._server

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace_s=0.2)


async def eventually(condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def client(router: RouterServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(router.host.endpoint) as client:
        yield client


def text_ids(card: ModelCard, text: str) -> list[int]:
    """Return the token ids of the answer `text` with its end token."""
    return [*card.tokenizer.encode_text(text), card.tokenizer.special_id("<|im_end|>")]


def chat_of(messages: Sequence[Any]) -> router_pb2.Chat:
    """Build a conversation of these messages."""
    return chat_request(messages, {}).chat


def script(model: FakeModel, *answers: Sequence[int]) -> None:
    """Make the model give these answers, one for each distinct prompt in order."""
    known: dict[tuple[int, ...], int] = {}

    def answer(prompt: Sequence[int], sampling: Any) -> Sequence[int]:
        index = known.setdefault(tuple(prompt), len(known))
        return answers[min(index, len(answers) - 1)]

    model.answer = answer
