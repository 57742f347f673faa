"""The thread that runs the head: answers the queued work of all streams in one batch."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.engine.step.draft_head import MAX_DRAFT_TOKENS, DraftHead, HeadRows
from libs.worker.engine.model_thread import ModelThread
from libs.worker.process.warm_up import warm_up_head
from slipstream.errors import InvalidArgument

log = logging.getLogger(__name__)

MAX_FAILED_BATCHES_IN_ROW = 3


@dataclass(frozen=True, slots=True)
class Proposal:
    """An answer to one extend; `tokens` is empty when there is nothing to propose."""

    seq_id: str
    base_tokens: int
    tokens: tuple[int, ...]
    is_unread: bool = False  # the rows did not arrive


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One request of a stream. `answer` is called on the event loop, once."""

    rows: Sequence[HeadRows]
    closed: Sequence[str]
    draft_tokens: Sequence[int]  # for each of `rows`; 0 = only extend
    answer: Callable[[list[Proposal]], None]
    min_confidence: float = 0.0  # see DraftHead.propose_batch


class Batcher:
    """Owns a head and its thread.

    A batch that raises is answered without proposals, and its sequences are closed: decoding goes on
    without drafts. After several such batches in a row the head itself is broken, and `on_broken` is
    called, once, on the event loop.
    """

    def __init__(
        self, load: Callable[[], DraftHead], *, on_broken: Callable[[], None] = lambda: None
    ) -> None:
        self._load = load
        self._on_broken = on_broken
        self._failed_batches = 0
        self._queue: collections.deque[DraftWork] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: ModelThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.sequences = 0  # contexts held after the latest batch
        self.batches = 0
        self.busy_s = 0.0  # of all batches so far

    async def start(self) -> DraftHead:
        """Load the head on the thread; raises what loading raised. Read its attributes only."""
        self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[DraftHead] = self._loop.create_future()
        self._thread = ModelThread(self._run, loaded, name="drafter")
        self._thread.start()
        return await loaded

    def submit(self, work: DraftWork) -> None:
        """Queue it; returns at once."""
        with self._wake:
            self._queue.append(work)
            self._wake.notify_all()

    async def stop(self) -> None:
        """End after the current batch."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            await self._thread.ended()

    def _run(self, loaded: asyncio.Future[DraftHead]) -> None:
        try:
            head = self._load()
            warm_up_head(head)
        except BaseException as error:
            self._post(loaded.set_exception, error)
            return
        self._post(loaded.set_result, head)
        try:
            while batch := self._next_batch():
                began_s = time.monotonic()
                answers = self._answer(head, batch)
                self.busy_s += time.monotonic() - began_s
                self.sequences = head.sequences
                self.batches += 1
                for work, proposals in zip(batch, answers, strict=True):
                    self._post(work.answer, proposals)
        except BaseException:
            log.exception("the draft head is broken")
            self.sequences = 0
            self._post(self._on_broken)

    def _next_batch(self) -> list[DraftWork]:
        """All work that waits, at least one piece; empty after `stop`."""
        with self._wake:
            while not self._queue and not self._stopping:
                self._wake.wait()
            batch = [] if self._stopping else list(self._queue)
            self._queue.clear()
            return batch

    def _answer(self, head: DraftHead, batch: Sequence[DraftWork]) -> list[list[Proposal]]:
        """Answer like `answer_batch`; raise only when the head is unusable."""
        try:
            answers = answer_batch(head, batch)
        except Exception:
            self._failed_batches += 1
            if self._failed_batches >= MAX_FAILED_BATCHES_IN_ROW:
                raise
            log.exception("a batch of drafts failed")
            return _close_all(head, batch)
        if any(work.rows for work in batch):  # closing alone proves nothing
            self._failed_batches = 0
        return answers

    def _post(self, function: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: the process ends
            log.debug("event loop closed before the drafter thread ended")


def answer_batch(head: DraftHead, batch: Sequence[DraftWork]) -> list[list[Proposal]]:
    """Run the head over all of `batch`; one answer for each extend, in order.

    Of several extends of one sequence only the newest is worth a proposal; the others are answered
    with none.
    """
    accepted = _extend(head, [rows for work in batch for rows in work.rows])
    newest = {rows.seq_id: rows for work in batch for rows in work.rows if id(rows) in accepted}
    wanted: dict[str, int] = {}
    for work in batch:
        for rows, n_drafts in zip(work.rows, work.draft_tokens, strict=True):
            if n_drafts and newest.get(rows.seq_id) is rows:
                wanted[rows.seq_id] = min(n_drafts, MAX_DRAFT_TOKENS)
    # One chain serves all streams: the longest that any of them asks for.
    tokens = _propose(head, wanted, min((work.min_confidence for work in batch if work.rows), default=0.0))
    for work in batch:
        for seq_id in work.closed:
            head.close(seq_id)
    return [
        [
            Proposal(
                rows.seq_id,
                rows.base_tokens,
                tuple(tokens.get(rows.seq_id, ())) if newest.get(rows.seq_id) is rows else (),
            )
            for rows in work.rows
        ]
        for work in batch
    ]


def _close_all(head: DraftHead, batch: Sequence[DraftWork]) -> list[list[Proposal]]:
    """Close every sequence of `batch`, whose contexts may be half-written; answers without proposals."""
    for work in batch:
        for seq_id in (*(rows.seq_id for rows in work.rows), *work.closed):
            head.close(seq_id)
    return [[Proposal(rows.seq_id, rows.base_tokens, ()) for rows in work.rows] for work in batch]


def _extend(head: DraftHead, rows: Sequence[HeadRows]) -> set[int]:
    """Take the rows in; those that do not fit are left out. Returns the ids of the accepted objects."""
    if not rows:
        return set()
    try:
        head.extend_batch(rows)
        return {id(r) for r in rows}
    except InvalidArgument:
        accepted = set()
        for r in rows:
            try:
                head.extend_batch([r])
                accepted.add(id(r))
            except InvalidArgument as error:
                log.warning("rows of %s are refused: %s", r.seq_id, error)
                head.close(r.seq_id)
        return accepted


def _propose(head: DraftHead, wanted: dict[str, int], min_confidence: float) -> dict[str, list[int]]:
    if not wanted:
        return {}
    proposed = head.propose_batch(list(wanted), max(wanted.values()), min_confidence=min_confidence)
    return {seq_id: tokens[: wanted[seq_id]] for seq_id, tokens in proposed.items()}
