"""A prefill worker of the simulation: engine, prefix cache, and KV read from elsewhere.

`SharedSteps` is the production worker's engine (scheduling/scheduler.py): the prompt that needs least, and a
quarter of each step for the oldest of those that have waited for too long. Steps are short beside prompts,
so this is simulated as a flow: between two events at most two prompts advance. A prompt that needs blocks
another one is about to compute gives its turn to that one and takes them over
(libs/engine/scheduling/prefix_sharing.py). `InOrder` computes one prompt after the other, as they came.

What of a prompt is cached is settled when the engine first turns to it. What a kvstore or another prefill
worker holds beyond the own cache is read before that, beside whatever the engine computes; each worker reads
from one source at a time and lends to one at a time. Blocks that another worker has read are the first to
go at the lender (libs/worker/peer_cache/peer_cache_server.py): there they are the newest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.placement.cache import LruCache
from bench.placement.model import Hardware, Run
from bench.placement.trace import BLOCK_TOKENS
from libs.common.prefill_order import OVERDUE_SHARE, PATIENCE, is_overdue, order_key

STORE = -1  # for `PrefillWorld.blocks_changed`
_DONE_MS = 1e-6
_PATIENCE_STEP_MS = 1.0


class PrefillWorld(Protocol):
    """The interface that a prefill worker needs of its simulation."""

    hardware: Hardware
    now_ms: float
    store: LruCache | None

    def at(self, time_ms: float, event: Callable[[], None]) -> None:
        """Run `event` then."""

    def noisy(self, duration_ms: float) -> float:
        """A duration as it happens."""

    def lender(self, worker: int) -> PrefillNode:
        """A prefill worker, to read from."""

    def blocks_changed(self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """The cache of a prefill worker, or of the kvstore (STORE), has changed."""

    def computed(self, run: Run) -> None:
        """The first token is there."""


class PrefillNode(ABC):
    """One prefill worker. `line`: its prompts in the order they came."""

    def __init__(self, number: int, sim: PrefillWorld) -> None:
        self.number = number
        self.cache = LruCache(sim.hardware.cache_blocks)
        self.busy_ms = 0.0
        self.lent_blocks = 0
        self.line: list[Run] = []
        self._reads_until_ms = 0.0
        self._lends_until_ms = 0.0
        self._reading: set[int] = set()
        self._rates: list[tuple[Run, float]] = []  # who is computed now, and at which share of the time
        self._sim = sim
        self._at_ms = 0.0
        self._tokens_done = 0.0
        self._version = 0

    @property
    def requests(self) -> int:
        """The requests that wait or are computed now."""
        return len(self.line)

    def queued_tokens(self) -> int:
        """Not computed yet, as the worker and the router count them."""
        return sum(self.queue())

    def queue(self) -> list[int]:
        """The waiting requests of each prompt."""
        self._advance()
        return [run.tokens_left for run in self.line]

    def send(self, run: Run) -> None:
        """A prompt comes."""
        self._advance()
        self.line.append(run)
        run.waits_from = self._tokens_done
        if not self._read(run):
            self._plan()

    # ---- KV from elsewhere

    def _read(self, run: Run) -> bool:
        """Begin to read what the run's source holds; False when that is nothing of use."""
        sim, hashes = self._sim, run.request.hashes
        lender = sim.lender(run.peer) if run.peer is not None else None
        cache = lender.cache if lender is not None else sim.store
        if cache is None:
            return False
        usable = hashes[: (run.request.prompt_tokens - 1) // BLOCK_TOKENS]
        held = self.cache.prefix_blocks(usable)
        there = cache.prefix_blocks(usable)
        if there <= held:
            return False
        model = sim.hardware.prefill
        token_ms = model.peer_token_ms if lender is not None else model.dram_token_ms
        begins_ms = max(
            sim.now_ms, self._reads_until_ms, lender._lends_until_ms if lender is not None else 0.0
        )
        ends_ms = begins_ms + sim.noisy(token_ms * (there - held) * BLOCK_TOKENS)
        self._reads_until_ms = ends_ms
        if lender is not None:
            lender._lends_until_ms = ends_ms
        run.read_tokens = (there - held) * BLOCK_TOKENS
        self._reading.add(run.request.number)
        read = usable[held:there]

        def ended() -> None:
            self._advance()
            self._reading.discard(run.request.number)
            run.waits_from = self._tokens_done
            self._keep(usable[:there])
            if lender is not None:
                lender.cache.give_up_first(read)
                lender.lent_blocks += len(read)
            self._plan()

        sim.at(ends_ms, ended)
        return True

    def _keep(self, hashes: Sequence[bytes]) -> None:
        sim = self._sim
        sim.blocks_changed(self.number, *self.cache.put(hashes))
        if sim.store is not None:
            sim.blocks_changed(STORE, *sim.store.put(hashes))

    # ---- the engine

    @abstractmethod
    def _share(self, runnable: Sequence[Run]) -> list[tuple[Run, float]]:
        """The runs of these, the oldest first, that are computed now; the shares sum to 1."""

    def _patience_ms(self, runnable: Sequence[Run]) -> float:
        """The time until a run's wait changes the shares."""
        return math.inf

    def _advance(self) -> None:
        elapsed_ms, self._at_ms = self._sim.now_ms - self._at_ms, self._sim.now_ms
        before = {run.request.number: run.exact_left for run, _ in self._rates}
        for run, rate in self._rates:
            run.left_ms -= rate * elapsed_ms
        done = {run.request.number: before[run.request.number] - run.exact_left for run, _ in self._rates}
        self._tokens_done += sum(done.values())
        for run, _ in self._rates:  # what is computed for itself is no wait
            run.waits_from += done[run.request.number]

    def _plan(self) -> None:
        """Choose the runs to compute from now on, and the latest time of the next choice."""
        self._version += 1
        self._rates = []
        runnable = [run for run in self.line if run.request.number not in self._reading]
        if not runnable:
            return
        shares: dict[int, tuple[Run, float]] = {}
        until_ms = math.inf
        for run, share in self._share(runnable):
            leader, common_ms = self._leader(run)
            if leader is run:
                self._settle(run)
            _, more = shares.get(leader.request.number, (leader, 0.0))
            shares[leader.request.number] = (leader, share + more)
            until_ms = min(until_ms, common_ms)
        self._rates = list(shares.values())
        for run, share in self._rates:
            until_ms = min(until_ms, max(run.left_ms, 0.0) / share)
        until_ms = min(until_ms, self._patience_ms(runnable))
        version = self._version
        self._sim.at(self._sim.now_ms + until_ms, lambda: self._think_over(version))

    def _leader(self, run: Run) -> tuple[Run, float]:
        """The run that computes the next block of `run`, and the least time in which that one
        has computed all that both need."""
        if run.takes_ms:
            return run, math.inf
        hashes = run.request.hashes
        held = self._held(run)
        for each in self.line:
            theirs = each.request.hashes
            if each.takes_ms and held < min(len(hashes), len(theirs)) and theirs[held] == hashes[held]:
                common = held + _common(hashes[held:], theirs[held:])
                missing = common * BLOCK_TOKENS - (each.request.prompt_tokens - each.exact_left)
                if missing > 1e-3:
                    return each, missing / each.uncached_tokens * each.takes_ms
        return run, math.inf

    def _held(self, run: Run) -> int:
        """Leading blocks in the cache."""
        return self.cache.prefix_blocks(run.request.hashes)

    def _need(self, run: Run) -> int:
        if run.takes_ms:
            return run.tokens_left
        return run.request.prompt_tokens - self._held(run) * BLOCK_TOKENS

    def _settle(self, run: Run) -> None:
        if run.takes_ms:
            return
        hashes = run.request.hashes
        held = self._held(run)
        for each in self.line:  # blocks of those that are not done yet
            if each.takes_ms:
                done = int(each.request.prompt_tokens - each.exact_left + 1e-3) // BLOCK_TOKENS
                held = max(held, _common(hashes, each.request.hashes[:done]))
        run.cached_tokens = min(held * BLOCK_TOKENS, run.request.prompt_tokens - 1)
        run.takes_ms = run.left_ms = self._sim.noisy(
            self._sim.hardware.prefill.compute_ms(run.uncached_tokens, run.request.prompt_tokens)
        )
        self.busy_ms += run.takes_ms

    def _think_over(self, version: int) -> None:
        if version != self._version:
            return
        sim = self._sim
        self._advance()
        for run in [run for run, _ in self._rates if run.left_ms <= _DONE_MS]:
            self.line.remove(run)
            run.first_token_ms = sim.now_ms
            self._keep(run.request.hashes)
            sim.computed(run)
        self._plan()


class SharedSteps(PrefillNode):
    """Steps that prompts share, as in the engine."""

    def _share(self, runnable: Sequence[Run]) -> list[tuple[Run, float]]:
        shortest = min(runnable, key=lambda run: order_key(self._need(run), run.request.number))
        overdue = next((run for run in runnable if self._is_overdue(run)), shortest)
        if overdue is shortest:
            return [(shortest, 1.0)]
        return [(overdue, 1 / OVERDUE_SHARE), (shortest, 1 - 1 / OVERDUE_SHARE)]

    def _patience_ms(self, runnable: Sequence[Run]) -> float:
        tokens_per_ms = sum(share * run.uncached_tokens / run.takes_ms for run, share in self._rates)
        waits = [
            PATIENCE * self._need(run) - self._waited(run) for run in runnable if not self._is_overdue(run)
        ]
        # Those that are computed lose patience somewhat later than this: then it is thought over once more.
        return max(min(waits, default=math.inf) / tokens_per_ms, _PATIENCE_STEP_MS)

    def _is_overdue(self, run: Run) -> bool:
        return is_overdue(self._waited(run), self._need(run))

    def _waited(self, run: Run) -> float:
        return self._tokens_done - run.waits_from


class InOrder(PrefillNode):
    """One prompt after the other."""

    def _share(self, runnable: Sequence[Run]) -> list[tuple[Run, float]]:
        begun = [run for run in runnable if run.takes_ms]
        return [(begun[0] if begun else runnable[0], 1.0)]


def _common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
