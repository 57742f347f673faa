"""A decode worker of the simulation: all its sequences in one batch.

A step grows with the number of sequences and their context. Between two events the batch is the same, so the
steps in between have a closed form and need no loop.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bench.placement.model import Hardware, Run


class DecodeWorld(Protocol):
    """The interface that a decode worker needs of its simulation."""

    hardware: Hardware
    now_ms: float

    def at(self, time_ms: float, event: Callable[[], None]) -> None:
        """Run `event` then."""


class DecodeNode:
    """One decode worker: a batch whose members all advance by one token a step."""

    def __init__(self, sim: DecodeWorld) -> None:
        self._sim = sim
        self.assigned_tokens = 0  # prompts and room for answers, from the time of routing on
        self.assigned = 0
        self.context = 0.0  # of the batch
        self.idle_ms = 0.0  # when the last sequence so far ended
        self._ends: list[tuple[float, int, Run]] = []  # by the step count at which a sequence is done
        self._steps = 0.0
        self._at_ms = 0.0
        self._line: deque[Run] = deque()
        self._version = 0

    @property
    def sequences(self) -> int:
        """The sequences in the batch."""
        return len(self._ends)

    def step_ms(self) -> float:
        """How long a step takes now."""
        return self._sim.hardware.decode.step_ms(self.sequences, int(self.context))

    def join(self, run: Run) -> None:
        """The sequence's KV is here."""
        self._advance()
        self._line.append(run)
        self._admit()

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

    def _advance(self) -> None:
        """Up to now."""
        elapsed_ms, self._at_ms = self._sim.now_ms - self._at_ms, self._sim.now_ms
        if not self._ends or elapsed_ms <= 0:
            return
        # A step takes a + b k after k steps: elapsed = a k + b k^2 / 2.
        a, b = self.step_ms(), self._sim.hardware.decode.context_ms * 1e-3 * self.sequences
        steps = (math.sqrt(a * a + 2 * b * elapsed_ms) - a) / b if b else elapsed_ms / a
        self._steps += steps
        self.context += steps * self.sequences

    def _plan(self) -> None:
        self._version += 1
        if self._ends:
            k = max(self._ends[0][0] - self._steps, 0.0)
            b = self._sim.hardware.decode.context_ms * 1e-3 * self.sequences
            due_ms = self._sim.now_ms + self.step_ms() * k + b * k * k / 2
            version = self._version
            self._sim.at(due_ms, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, run = heapq.heappop(self._ends)
            self.context -= run.request.prompt_tokens + run.request.output_tokens - 1
            self.release(run)
            run.done_ms = self._sim.now_ms
        self.idle_ms = self._sim.now_ms
        if not self._ends:
            self.context = 0.0
        self._admit()

    def expect(self, run: Run) -> None:
        """A request was routed here."""
        self.assigned += 1
        self.assigned_tokens += run.request.prompt_tokens

    def release(self, run: Run) -> None:
        """End a sequence."""
        self.assigned -= 1
        self.assigned_tokens -= run.request.prompt_tokens
