"""A StepModel whose steps take at least a given time, as those of a larger model on other hardware."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from libs.engine.step.batch import ForwardBatch
from libs.engine.step.page_parts import PageParts
from libs.engine.step.step_model import SequenceRows, StepModel, StepResult
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import DeviceBytes, EngineInfo


class PacedModel:
    """Runs `model`, then waits; for benchmarks of drafts and services around slow steps."""

    def __init__(
        self,
        model: StepModel,
        least_step_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self._least_step_s = least_step_s
        self._clock, self._sleep = clock, sleep

    @property
    def info(self) -> EngineInfo:
        return self.model.info

    @property
    def memory(self) -> memoryview | DeviceBytes:
        return self.model.memory

    @property
    def memory_address(self) -> int:
        return self.model.memory_address

    @property
    def page_parts(self) -> PageParts | None:
        return self.model.page_parts

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        began_s = self._clock()
        result = self.model.run(batch, rows, stop)
        self._sleep(max(self._least_step_s - (self._clock() - began_s), 0.0))
        return result

    def close(self) -> None:
        self.model.close()
