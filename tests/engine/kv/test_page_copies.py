"""Copies of a device's pages: behind what wrote them, and not behind the steps that were launched since."""

from __future__ import annotations

import pytest
import torch

from libs.engine.kv.page_copies import PageCopies
from tests.engine.kv.late_streams import LateCuda, LateMemory

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
    cuda.steps.synchronize()  # the host reads the tokens of that step
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


def test_a_read_of_a_landed_page_waits_for_the_copies_of_the_transport(cuda: LateCuda) -> None:
    """A transport's copy of a few bytes goes on when its call has returned."""
    memory = cuda.memory(4 * PAGE_BYTES)
    copies = PageCopies(memory, PAGE_BYTES)
    memory[page_of(memory, 2)] = 8  # by the transport, on the default stream
    assert bytes(copies.read(2, has_landed=True)) == bytes([8] * PAGE_BYTES)
    assert cuda.current is cuda.steps


def test_a_page_is_read_into_pinned_memory_and_complete(cuda: LateCuda) -> None:
    memory = cuda.memory(4 * PAGE_BYTES)
    copies = PageCopies(memory, PAGE_BYTES)
    memory[page_of(memory, 1)] = 5
    cuda.steps.synchronize()
    assert bytes(copies.read(1)) == bytes([5] * PAGE_BYTES)
    assert cuda.pinned_bytes == PAGE_BYTES


def test_without_pinned_memory_pages_pass_through_pageable_memory(
    cuda: LateCuda, caplog: pytest.LogCaptureFixture
) -> None:
    memory = cuda.memory(4 * PAGE_BYTES)
    cuda.pinnable_bytes = PAGE_BYTES
    copies = PageCopies(memory, PAGE_BYTES)
    memory[page_of(memory, 1)] = 5
    copies.copy([(1, 2), (1, 3)])
    assert [bytes(copies.read(page)) for page in (1, 2, 3)] == [bytes([5] * PAGE_BYTES)] * 3
    assert cuda.pinned_bytes == 2 * PAGE_BYTES, "the third read does not try again"
    assert len(caplog.records) == 1


def test_another_device_has_no_pinned_memory() -> None:
    memory = torch.arange(2 * PAGE_BYTES, dtype=torch.uint8)
    copies = PageCopies(memory, PAGE_BYTES)
    page = copies.read(1)
    assert bytes(page) == bytes(range(PAGE_BYTES, 2 * PAGE_BYTES))
