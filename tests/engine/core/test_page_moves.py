"""Copies of pages by other processes: only those within the cache hold up the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import FakeModel, build_fake_engine
from slipstream.errors import FailedPrecondition, NotFound, OutOfPages
from tests.engine.support import check_accounting, drive, generate, make_spec

BLOCK = 4
PROMPT = list(range(1, 19))
WAIT_S = 10.0


class HeldMoves:
    """A `PageParts` whose copies wait for `go`; `begun` is set by each. It has one memory, that of peers."""

    def __init__(self, model: FakeModel) -> None:
        self._memory, self._page_bytes = model.memory, model.info.page_bytes
        self.begun, self.go = threading.Event(), threading.Event()
        self.moved: list[int] = []

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        known = list(pairs)
        self._wait(target for _, target in known)
        for source, target in known:
            self._memory[self._span(target)] = self._memory[self._span(source)]

    def collect(self, pages: Sequence[int]) -> None:
        raise AssertionError("no test exports pages")

    def scatter(self, pages: Sequence[int]) -> None:
        self._wait(pages)

    def _wait(self, pages: Iterable[int]) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.moved += pages

    def _span(self, page: int) -> slice:
        return slice(page * self._page_bytes, (page + 1) * self._page_bytes)


def build() -> PagedEngine:
    return build_fake_engine(n_pages=32, block_tokens=BLOCK, vocab_size=50, max_context_tokens=64)


@pytest.fixture
def model() -> FakeModel:
    found = build().model
    assert isinstance(found, FakeModel)
    return found


@pytest.fixture
def moves(model: FakeModel) -> HeldMoves:
    return HeldMoves(model)


@pytest.fixture
def engine(model: FakeModel, moves: HeldMoves) -> PagedEngine:
    """Only the calls of `try_release` are beside others, as those of the event loop are."""
    model.page_parts = moves  # type: ignore[assignment]
    return PagedEngine(model)


@pytest.fixture
def on_thread(moves: HeldMoves) -> Iterator[Callable[[Callable[[], object]], Future[object]]]:
    """Run a call on a thread as the engine's, until its first copy waits."""
    with ThreadPoolExecutor(1) as thread:

        def begin(call: Callable[[], object]) -> Future[object]:
            future = thread.submit(call)
            assert moves.begun.wait(WAIT_S)
            return future

        yield begin
        moves.go.set()


Begin = Callable[[Callable[[], object]], "Future[object]"]


def released_meanwhile(engine: PagedEngine, seq_id: str) -> None:
    """Release as the event loop does. Fails when that waits for the copy, which goes on only afterwards."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(engine.try_release, seq_id).result(WAIT_S / 2)


def test_steps_and_releases_do_not_wait_for_pages_that_arrive(
    engine: PagedEngine, moves: HeldMoves, on_thread: Begin
) -> None:
    alone = generate(build(), [make_spec("x", PROMPT[5:])])
    pages = engine.reserve(make_spec("a", PROMPT)).pages
    engine.reserve(make_spec("other", PROMPT[9:]))
    engine.reserve(make_spec("running", PROMPT[5:]))
    engine.start("running")
    received = on_thread(lambda: engine.receive("a", 16))
    assert drive(engine).tokens["running"] == alone["x"]
    released_meanwhile(engine, "other")
    moves.go.set()
    received.result(WAIT_S)
    assert moves.moved == list(pages[:4])
    engine.fill("a", 16)
    engine.release("a")
    engine.release("running")
    check_accounting(engine)
    assert engine.reserve(make_spec("b", PROMPT)).cached_tokens == 16


def test_pages_of_a_sequence_that_is_released_while_they_arrive_are_given_to_no_other(
    engine: PagedEngine, moves: HeldMoves, on_thread: Begin
) -> None:
    arriving = engine.reserve(make_spec("a", PROMPT)).pages[:4]
    received = on_thread(lambda: engine.receive("a", 16))
    released_meanwhile(engine, "a")
    ledger = engine.ledger()
    assert ledger.pages_held == ledger.launched_pages == 4
    others = [engine.reserve(make_spec(f"b{i}", [i + 1] * n)).pages for i, n in enumerate((55, 51))]
    others.append(engine.reserve(make_spec("a", [7])).pages)  # another sequence of the same name
    assert not {page for pages in others for page in pages} & set(arriving)
    with pytest.raises(OutOfPages):
        engine.reserve(make_spec("c", [8]))
    moves.go.set()
    with pytest.raises(NotFound):
        received.result(WAIT_S)
    for seq_id in ("a", "b0", "b1"):
        engine.release(seq_id)
    check_accounting(engine)
    assert engine.ledger().pages_free == 32
    assert engine.reserve(make_spec("b", PROMPT)).cached_tokens == 0


def test_a_fill_takes_only_pages_that_were_received(engine: PagedEngine, moves: HeldMoves) -> None:
    moves.go.set()
    pages = engine.reserve(make_spec("a", PROMPT)).pages
    with pytest.raises(FailedPrecondition, match="filled to 19"):
        engine.receive("a", 19)
    engine.receive("a", 10)
    engine.fill("a", 10)
    with pytest.raises(FailedPrecondition, match="received to 10"):
        engine.fill("a", 16)
    engine.receive("a", 16)
    engine.fill("a", 16)
    assert moves.moved == [*pages[:3], *pages[2:4]]
    engine.release("a")
    check_accounting(engine)


@pytest.mark.parametrize("leaves", ["reader", "other"])
def test_a_release_does_not_wait_for_copies_of_a_shared_prefix(
    engine: PagedEngine, moves: HeldMoves, on_thread: Begin, leaves: str
) -> None:
    """`reader` copies the blocks of `source`. It may leave meanwhile, and its output then never comes."""
    alone = generate(build(), [make_spec("x", PROMPT)])
    for seq_id, prompt in (("source", PROMPT), ("reader", PROMPT), ("other", PROMPT[5:])):
        engine.reserve(make_spec(seq_id, prompt))
    engine.start("source")
    engine.step()
    engine.start("reader")
    engine.start("other")
    stepped = on_thread(engine.step)
    released_meanwhile(engine, leaves)
    moves.go.set()
    outputs = stepped.result(WAIT_S)
    assert isinstance(outputs, list)
    assert leaves not in {output.seq_id for output in outputs}
    check_accounting(engine)
    transcript = drive(engine)
    if leaves == "other":
        found = [token for output in outputs if output.seq_id == "reader" for token in output.tokens]
        assert found + transcript.tokens["reader"] == alone["x"]
    engine.release("source")
    engine.release("reader")
    engine.release("other")
    check_accounting(engine)
    assert engine.ledger().pages_held == 0


def test_pages_that_a_copy_alone_holds_are_accounted_for(
    engine: PagedEngine, moves: HeldMoves, on_thread: Begin
) -> None:
    """Both sequences leave while the blocks of `source` are copied for `reader`."""
    engine.reserve(make_spec("source", PROMPT))
    engine.reserve(make_spec("reader", PROMPT))
    engine.start("source")
    engine.step()
    engine.start("reader")
    stepped = on_thread(engine.step)
    for seq_id in ("source", "reader"):
        released_meanwhile(engine, seq_id)
    ledger = engine.ledger()
    assert ledger.pages_held == ledger.launched_pages == 4
    moves.go.set()
    stepped.result(WAIT_S)
    assert engine.ledger().pages_held == 0
    check_accounting(engine)
