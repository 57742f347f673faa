"""A device whose steps run as late as they may: a launched step does nothing until its result is asked for.

Between its launch and its result anything may happen to the engine's sequences and pages. A page that was
reused too early then has the late row's bytes in it, which the fake model finds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from libs.engine.core.fake import FakeModel
from libs.engine.sampling.device_draws import samples_on_device
from libs.engine.step.batch import ForwardBatch, Int32Array
from libs.engine.step.step_model import SequenceRows, StepResult, lay_out
from libs.engine.step.stop_flag import StopFlag
from slipstream.errors import DataCorrupt

_NO_TOKEN = -7  # of a row whose sequence has lost its pages: no one may see it


@dataclass
class _Queued:
    rows: list[SequenceRows]
    sources: Int32Array
    tokens: list[int] | None = None


class DeferredStep:
    def __init__(self, model: DeferredModel, queued: _Queued) -> None:
        self._model, self._queued = model, queued

    def result(self) -> StepResult:
        return StepResult(self._model.run_until(self._queued), None, None)


class DeferredModel(FakeModel):
    """Runs each row alone, so that one without its pages harms no other."""

    def __init__(self, model: FakeModel) -> None:
        self.__dict__.update(model.__dict__)
        self._queue: deque[_Queued] = deque()
        self._tokens: list[int] = []
        self.n_launched = 0
        self.n_followed = 0  # rows that took an unknown token
        self.n_rows = 0  # that were sampled
        self.during_wait: Callable[[], None] = lambda: None  # calls of another thread
        self.fails = ""  # where the next failure is: in the launch, at its end, or in the result

    def can_launch(self, rows: Sequence[SequenceRows]) -> bool:
        return all(samples_on_device(r) for r in rows)

    def launch(self, batch: ForwardBatch, rows: Sequence[SequenceRows], sources: Int32Array) -> DeferredStep:
        assert batch.n_rows == len(rows) == len(sources)
        if self.fails == "launch":
            self.fails = ""
            raise RuntimeError("the device failed")
        self.n_launched += 1
        self.n_followed += int((sources >= 0).sum())
        kept = [replace(r, tokens=r.tokens.copy(), pages=list(r.pages)) for r in rows]
        queued = _Queued(kept, sources.copy())
        self._queue.append(queued)
        if self.fails == "half":  # its rows began before the error, so they run before anyone sees it
            self.run_until(queued)
            self.fails = ""
            raise RuntimeError("the device failed")
        return DeferredStep(self, queued)

    def run_until(self, wanted: _Queued) -> list[int]:
        self.during_wait()
        if self.fails == "result":
            self.fails = ""
            self._queue.clear()
            raise RuntimeError("the device failed")
        while wanted.tokens is None:
            queued = self._queue.popleft()
            before, self._tokens = self._tokens, []
            self.n_rows += len(queued.rows)
            for row, source in zip(queued.rows, queued.sources.tolist(), strict=True):
                assert row.first_index == len(row.tokens) - row.n_prompt  # what the seed's draw depends on
                if source >= 0:
                    row.tokens[-1] = max(before[source], 0)
                self._tokens.append(self._run_row(row))
            queued.tokens = self._tokens
        return wanted.tokens

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        assert not self._queue, "a step of the host began before the launched ones ended"
        self.n_rows += sum(r.n_sampled for r in rows)
        return super().run(batch, rows, stop)

    def _run_row(self, row: SequenceRows) -> int:
        batch = lay_out([row], block_tokens=self.info.block_tokens, want_features=False)
        try:
            return super().run(batch, [row], StopFlag()).tokens[0]
        except DataCorrupt:
            # A device checks nothing: it writes what it has computed.
            block, slot = divmod(len(row.tokens) - 1, self.info.block_tokens)
            at = row.pages[block] * self.info.page_bytes + slot * self._row_bytes
            self.memory[at : at + self._row_bytes] = np.full(self._row_bytes, 63, np.uint8).tobytes()
            return _NO_TOKEN
