"""A decode worker of the simulation: all its sequences in one batch, and the prompts that it computes itself.

A step grows with the number of sequences and their context, and by a chunk of a prompt while one is computed.
Between two events batch and prompt are the same, so the steps in between have a closed form and need no loop.
KV that the worker pulled or computed stays in its cache for later turns.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.placement.cache import LruCache
from bench.placement.model import Hardware, Run
from bench.placement.trace import BLOCK_TOKENS

_DONE_MS = 1e-6


class DecodeWorld(Protocol):
    """The interface that a decode worker needs of its simulation."""

    hardware: Hardware
    now_ms: float
    store: LruCache | None

    def at(self, time_ms: float, event: Callable[[], None]) -> None:
        """Run `event` then."""

    def noisy(self, duration_ms: float) -> float:
        """A duration as it happens."""

    def computed_on_decode(self, run: Run) -> None:
        """The first token of a prompt that a decode worker computed is there."""

    def decode_blocks_changed(self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """The cache of a decode worker has changed."""


class DecodeNode:
    """One decode worker: a batch whose members all advance by one token a step."""

    def __init__(self, number: int, sim: DecodeWorld) -> None:
        self.number = number
        self.cache = LruCache(sim.hardware.decode_tokens // BLOCK_TOKENS)
        self.prompts: list[Run] = []  # to compute here, the first one now
        self._sim = sim
        self.assigned_tokens = 0  # prompts and room for answers, from the time of routing on
        self.assigned = 0
        self.context = 0.0  # of the batch
        self.busy_ms = 0.0  # with prompts
        self.idle_ms = 0.0  # when the last sequence so far ended
        self._ends: list[tuple[float, int, Run]] = []  # by the step count at which a sequence is done
        self._steps = 0.0
        self._at_ms = 0.0
        self._line: deque[Run] = deque()
        self._version = 0

    @property
    def sequences(self) -> int:
        """In the batch."""
        return len(self._ends)

    def step_ms(self) -> float:
        """How long a step takes now."""
        return self._sim.hardware.decode.step_ms(self.sequences, int(self.context))

    def prompt_tokens_left(self) -> int:
        """Of the prompts that are computed here."""
        self._advance()
        return sum([run.tokens_left for run in self.prompts])

    def held_tokens(self, run: Run) -> int:
        """Of the run's prompt, in the cache."""
        usable = run.request.hashes[: (run.request.prompt_tokens - 1) // BLOCK_TOKENS]
        return self.cache.prefix_blocks(usable) * BLOCK_TOKENS

    def compute(self, run: Run) -> None:
        """A prompt comes that is computed here, behind KV of the cache or of the kvstore."""
        sim, model = self._sim, self._sim.hardware.prefill
        held = stored = self.held_tokens(run)
        if sim.store is not None:
            usable = run.request.hashes[: (run.request.prompt_tokens - 1) // BLOCK_TOKENS]
            stored = max(held, sim.store.prefix_blocks(usable) * BLOCK_TOKENS)
        run.cached_tokens, run.read_tokens = stored, stored - held

        def loaded() -> None:
            self._advance()
            run.takes_ms = run.left_ms = sim.noisy(
                model.compute_ms(run.uncached_tokens, run.request.prompt_tokens)
            )
            self.busy_ms += run.takes_ms
            self.prompts.append(run)
            self._plan()

        sim.at(sim.now_ms + model.dram_token_ms * (stored - held), loaded)

    def join(self, run: Run) -> None:
        """The sequence's KV is here."""
        self._advance()
        self._keep(run)
        self._line.append(run)
        self._admit()

    def _keep(self, run: Run) -> None:
        self._sim.decode_blocks_changed(self.number, *self.cache.put(run.request.hashes))

    def _admit(self) -> None:
        hardware = self._sim.hardware
        while self._line and self.sequences < hardware.max_sequences:
            run = self._line[0]
            room = run.request.prompt_tokens + run.request.output_tokens
            if self._ends and self.context + room > hardware.decode_tokens:
                break
            self._line.popleft()
            ends = self._steps + run.request.output_tokens - 1
            heapq.heappush(self._ends, (ends, run.request.number, run))
            self.context += run.request.prompt_tokens
        self._plan()

    def _chunk_ms(self) -> float:
        """The share of a step that computes a prompt."""
        if not self.prompts:
            return 0.0
        run = self.prompts[0]
        return run.takes_ms * self._sim.hardware.chunk_tokens / run.uncached_tokens

    def _pace(self) -> tuple[float, float]:
        """A step takes a + b k after k steps: k steps take a k + b k^2 / 2."""
        slope = self._sim.hardware.decode.context_ms * 1e-3 * self.sequences
        return self.step_ms() + self._chunk_ms(), slope

    def _advance(self) -> None:
        """Up to now."""
        elapsed_ms, self._at_ms = self._sim.now_ms - self._at_ms, self._sim.now_ms
        if elapsed_ms <= 0:
            return
        if not self._ends:
            if self.prompts:
                self.prompts[0].left_ms -= elapsed_ms
            return
        a, b = self._pace()
        steps = 2 * elapsed_ms / (math.sqrt(a * a + 2 * b * elapsed_ms) + a)
        if self.prompts:
            self.prompts[0].left_ms -= steps * self._chunk_ms()
        self._steps += steps
        self.context += steps * self.sequences

    def _plan(self) -> None:
        """When the next sequence ends or the prompt is computed, whichever comes first."""
        self._version += 1
        due_ms = []
        if self._ends:
            a, b = self._pace()
            steps = [max(self._ends[0][0] - self._steps, 0.0)]
            if self.prompts:
                steps.append(max(self.prompts[0].left_ms, 0.0) / self._chunk_ms())
            due_ms = [a * k + b * k * k / 2 for k in steps]
        elif self.prompts:
            due_ms = [max(self.prompts[0].left_ms, 0.0)]
        if due_ms:
            version = self._version
            self._sim.at(self._sim.now_ms + min(due_ms), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        if self.prompts and self.prompts[0].left_ms <= _DONE_MS:
            run = self.prompts.pop(0)
            self._keep(run)
            self._sim.computed_on_decode(run)
            if run.request.output_tokens > 1:
                self._line.append(run)
        if self._ends and self._ends[0][0] <= self._steps + 1e-6:
            self._end_sequences()
        self._admit()

    def _end_sequences(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, run = heapq.heappop(self._ends)
            self.context -= run.request.prompt_tokens + run.request.output_tokens - 1
            self.release(run)
            run.done_ms = self._sim.now_ms
        self.idle_ms = self._sim.now_ms
        if not self._ends:
            self.context = 0.0

    def expect(self, run: Run) -> None:
        """A request was routed here."""
        self.assigned += 1
        self.assigned_tokens += run.request.prompt_tokens

    def release(self, run: Run) -> None:
        """It is over."""
        self.assigned -= 1
        self.assigned_tokens -= run.request.prompt_tokens
