"""Ranks whose memories are separate, as those of devices are: each has its layers and slots alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.core.engine import PagedEngine
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.parallel import group_runner
from libs.engine.parallel.commands import PageCommand
from libs.engine.parallel.group_runner import GroupRunner
from libs.engine.step.batch import ForwardOutput
from tests.engine.parallel.forked_ranks import forked_group
from tests.engine.parallel.test_group import (
    BATCHES,
    BLOCK_TOKENS,
    TOLERANCE,
    check_sequences,
    engine_of,
    make_batch,
)
from tests.engine.random_head import write_random_head
from tests.engine.support import generate, make_spec
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

CUTS = ["tp=2", "pp=2", "kv=2", "tp=2,pp=2", "kv=2,pp=2", "tp=4", "pp=4", "kv=4"]
LONG_CUTS = ["tp=2,kv=2", "tp=2,ep=2"]
CASES = [*CUTS, *(pytest.param(cut, marks=pytest.mark.soak) for cut in LONG_CUTS)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("separate")
    write_random_checkpoint(directory / "model", RandomCheckpoint(dtype="float32"))
    write_random_head(directory / "head")
    return directory / "model"


def options_of(model_dir: Path) -> RunnerOptions:
    return RunnerOptions(
        n_pages=64,
        block_tokens=BLOCK_TOKENS,
        threads=1,
        kv_dtype="float32",
        compute_dtype="float32",
        head_dir=model_dir.parent / "head",
    )


@pytest.fixture(scope="module")
def one(model_dir: Path) -> ModelRunner:
    return ModelRunner.load(model_dir, options_of(model_dir))


@pytest.fixture(scope="module", params=CASES)
def group(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[GroupRunner]:
    with forked_group(model_dir, options_of(model_dir), request.param, separate_pages=True) as runner:
        yield runner


def test_logits_and_collected_pages_equal_one_process(one: ModelRunner, group: GroupRunner) -> None:
    parts = group.page_parts
    assert parts is not None
    for batch in BATCHES:
        expected, found = one.forward(batch), group.forward(batch)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
        if expected.features is not None:
            torch.testing.assert_close(found.features, expected.features, rtol=0, atol=TOLERANCE)
    written = sorted({int(page) for batch in BATCHES for page in batch.page_table.ravel()})
    group.cache.pages.fill_(7.0)
    parts.collect(written)
    torch.testing.assert_close(group.cache.pages[written], one.cache.pages[written], rtol=0, atol=TOLERANCE)
    others = sorted(set(range(64)) - set(written))
    assert (group.cache.pages[others] == 7.0).all()


def test_a_rank_has_room_for_its_layers_and_slots_only(group: GroupRunner) -> None:
    sizes = group._model.options.sizes
    own, host = group._model.pages.own, group.cache
    assert own is not host
    n_layers = len(group._model.options.layers)
    assert own.n_bytes * host.shape.n_layers == host.n_bytes // sizes.kv * n_layers


def test_sequences_with_drafts_and_a_shared_prefix_equal_one_process(
    one: ModelRunner, group: GroupRunner
) -> None:
    """Running prompts with one prefix copy pages between steps, and later ones reuse them."""
    check_sequences(one, group)


def test_pages_pass_between_a_group_and_one_process_both_ways(one: ModelRunner, group: GroupRunner) -> None:
    prompt = np.random.default_rng(4).integers(0, 251, 70).tolist()
    whole = generate(engine_of(one), [make_spec("a", prompt)])["a"]
    for source, target in ((one, group), (group, one), (group, group)):
        pages, first = prefilled(engine_of(source), prompt)
        assert first == whole[0]
        assert continued(engine_of(target), prompt, pages, first) == whole


def test_a_prefix_of_a_peer_continues_with_the_rest_of_the_prompt(
    one: ModelRunner, group: GroupRunner
) -> None:
    prompt = np.random.default_rng(5).integers(0, 251, 70).tolist()
    whole = generate(engine_of(one), [make_spec("a", prompt)])["a"]
    pages, _ = prefilled(engine_of(one), prompt)
    engine = engine_of(group)
    reservation = engine.reserve(make_spec("a", prompt))
    write_pages(engine, reservation.pages[:3], pages)
    for n_blocks in (2, 3):
        engine.receive("a", n_blocks * BLOCK_TOKENS)
        engine.fill("a", n_blocks * BLOCK_TOKENS)
    engine.start("a")
    assert rest_of(engine) == whole


def test_pages_are_collected_beside_steps(one: ModelRunner, group: GroupRunner) -> None:
    """Threads of exports and the engine's thread send commands to all ranks in one order."""
    parts = group.page_parts
    assert parts is not None
    batch = make_batch([(206, 1)])
    group.forward(BATCHES[0])
    expected = one.forward(BATCHES[0]), one.forward(batch)
    with ThreadPoolExecutor(3) as threads:
        collected = [threads.submit(parts.collect, [page, 16]) for page in range(12)]
        found = [group.forward(batch) for _ in range(6)]
        for each in collected:
            each.result(60)
    for output in found:
        torch.testing.assert_close(output.logits, expected[1].logits, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(group.cache.pages[:12], one.cache.pages[:12], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("move", [GroupRunner.collect, GroupRunner.scatter])
def test_a_step_passes_between_the_pieces_of_a_large_move(
    one: ModelRunner,
    group: GroupRunner,
    monkeypatch: pytest.MonkeyPatch,
    move: Callable[[GroupRunner, Sequence[int]], None],
) -> None:
    written = sorted({int(page) for page in BATCHES[0].page_table.ravel()})
    expected = one.forward(BATCHES[0])
    group.forward(BATCHES[0])
    group.collect(written)  # a scatter then brings each page what it has
    monkeypatch.setattr(group_runner, "_TURN_BYTES", 2 * group.cache.page_bytes)
    if move is GroupRunner.collect:
        group.cache.pages.fill_(7.0)
    steps: list[tuple[Future[ForwardOutput], int]] = []
    move_piece = group._model.move_pages

    def moving(command: PageCommand) -> None:
        """The first piece has its turn; a step asks for one before the second does."""
        move_piece(command)
        if not steps:
            asked = group._turn._drawn
            steps.append((threads.submit(group.forward, BATCHES[0]), asked))
            while group._turn._drawn == asked:
                pass

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(group._model, "move_pages", moving)
        first = group._turn._drawn
        move(group, written)
        [(step, asked)] = steps
        torch.testing.assert_close(step.result(60).logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert asked == first + 1, "the step has the turn behind the first piece"
    assert group._turn._drawn == first + 1 + -(-len(written) // 2)
    torch.testing.assert_close(group.cache.pages[written], one.cache.pages[written], rtol=0, atol=TOLERANCE)


def prefilled(engine: PagedEngine, prompt: list[int]) -> tuple[list[bytes], int]:
    """The pages of a prompt as an export reads them, and the first token after it."""
    reservation = engine.reserve(make_spec("p", prompt, max_tokens=1))
    engine.start("p")
    tokens = [token for _ in range(4) for output in engine.step() for token in output.tokens]
    return [bytes(engine.read_page(page)) for page in reservation.pages], tokens[0]


def continued(engine: PagedEngine, prompt: list[int], pages: list[bytes], first: int) -> list[int]:
    """The tokens of a sequence whose pages a peer wrote."""
    reservation = engine.reserve(make_spec("a", prompt))
    write_pages(engine, reservation.pages, pages)
    engine.receive("a", len(prompt))
    engine.fill("a", len(prompt))
    engine.start("a", first_token=first)
    return [first, *rest_of(engine)]


def write_pages(engine: PagedEngine, numbers: tuple[int, ...], pages: list[bytes]) -> None:
    size = engine.info.page_bytes
    for page, content in zip(numbers, pages, strict=False):
        engine.memory[page * size : (page + 1) * size] = content


def rest_of(engine: PagedEngine) -> list[int]:
    found: list[int] = []
    while engine.has_work():
        found += [token for output in engine.step() for token in output.tokens]
    return found
