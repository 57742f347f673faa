"""Copies of a device's pages: behind what wrote them, and not behind the steps that were launched since."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import FakeModel, build_fake_engine
from libs.engine.kv.page_copies import PageCopies
from libs.engine.step.batch import Batch
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StopFlag
from tests.engine.kv.late_streams import LateCuda, LateMemory
from tests.engine.support import make_spec

PAGE_BYTES = 8


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    return LateCuda(monkeypatch)


def page_of(memory: LateMemory, page: int) -> slice:
    return slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)


def test_pages_of_the_host_are_read_and_copied_in_place() -> None:
    memory = memoryview(bytearray(range(3 * PAGE_BYTES)))
    copies = PageCopies(memory, PAGE_BYTES)
    copies.copy([(2, 0)])
    assert bytes(copies.read(0)) == bytes(copies.read(2)) == bytes(range(16, 24))
    copies.read(1)[0] = 77
    assert memory[PAGE_BYTES] == 77


def test_a_read_waits_for_no_step_that_was_launched_since(cuda: LateCuda) -> None:
    memory = cuda.memory(4 * PAGE_BYTES)
    copies = PageCopies(memory, PAGE_BYTES)
    memory[page_of(memory, 1)] = 5
    copies.mark()
    memory[page_of(memory, 2)] = 6  # a step ahead
    assert bytes(copies.read(1)) == bytes([5] * PAGE_BYTES)
    assert cuda.steps.n_waiting == 1, "that step has not run"
    assert cuda.current is cuda.steps


def test_a_read_sees_the_copies_that_were_made_before_it(cuda: LateCuda) -> None:
    memory = cuda.memory(4 * PAGE_BYTES)
    copies = PageCopies(memory, PAGE_BYTES)
    memory[page_of(memory, 0)] = 9
    copies.copy([(0, 1), (1, 3)])
    assert bytes(copies.read(3)) == bytes([9] * PAGE_BYTES)


class LateModel(FakeModel):
    """Its rows write a page of a late device, and the host does not wait."""

    def __init__(self, model: FakeModel, late: LateMemory) -> None:
        self.__dict__.update(model.__dict__)
        self._host, self.late = model.memory, late

    def run(self, batch: Batch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        result = super().run(batch, rows, stop)
        for page in rows[0].pages:
            size = self.info.page_bytes
            content = np.frombuffer(self._host[page * size : (page + 1) * size], np.uint8).copy()
            self.late[page * size : (page + 1) * size] = LateMemory(self.late._cuda, content)
        return result


def test_the_blocks_that_a_step_names_can_be_read_at_once(cuda: LateCuda) -> None:
    """The chunk of a prompt samples nothing, so that the host has not waited for it."""
    fake = build_fake_engine(n_pages=8, block_tokens=4, max_batch=4).model
    assert isinstance(fake, FakeModel)
    model = LateModel(fake, cuda.memory(fake.info.n_pages * fake.info.page_bytes))
    engine = PagedEngine(model, step_tokens=4)
    engine._copies = PageCopies(model.late, fake.info.page_bytes)
    engine.reserve(make_spec("s", list(range(12))))
    engine.start("s")
    [output] = engine.step()
    [block] = output.new_full_blocks
    assert not output.tokens and cuda.steps.n_waiting
    prompt = np.arange(12, dtype=np.uint32)
    assert bytes(engine.read_page(block.page)) == model.page_content(prompt, 0)
