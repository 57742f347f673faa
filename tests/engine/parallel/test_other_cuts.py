"""Groups of different cuts: pages of one continue under another; a dead rank ends its group."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from libs.engine.core.engine import PagedEngine
from libs.engine.core.torch_model import TorchModel
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.parallel.group_runner import GroupBroken, GroupRunner
from libs.engine.parallel.sizes import parse_sizes
from tests.engine.parallel.dead_ranks import kill_rank
from tests.engine.parallel.forked_ranks import forked_group
from tests.engine.support import generate, make_spec
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

OPTIONS = RunnerOptions(n_pages=64, block_tokens=16, threads=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, RandomCheckpoint(dtype="float32"))
    return directory


def engine_of(runner: ModelRunner | GroupRunner) -> PagedEngine:
    return PagedEngine(TorchModel(runner, max_batch=8, max_draft_tokens=4), step_tokens=64)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("tp=2", "pp=2"),
        ("pp=2", "dp=2,ep=2"),
        ("", "tp=2"),
        ("", "kv=2"),
        ("tp=2", "kv=2"),
        pytest.param("kv=2", "tp=2", marks=pytest.mark.soak),
        pytest.param("tp=2,pp=2", "tp=2,kv=2", marks=pytest.mark.soak),
    ],
)
def test_pages_of_one_cut_continue_under_another(model_dir: Path, prefill: str, decode: str) -> None:
    prompt = np.random.default_rng(4).integers(0, 251, 70).tolist()
    one = ModelRunner.load(model_dir, OPTIONS)
    whole = generate(engine_of(one), [make_spec("a", prompt)])["a"]
    pages, first = prefill_with(model_dir, prefill, prompt)
    assert first == whole[0]
    with forked_group(model_dir, OPTIONS, decode) as runner:
        engine = engine_of(runner)
        reservation = engine.reserve(make_spec("a", prompt))
        size = engine.info.page_bytes
        for page, content in zip(reservation.pages, pages, strict=True):
            engine.memory[page * size : (page + 1) * size] = content
        engine.receive("a", len(prompt))  # nothing, as these ranks share the pages
        engine.fill("a", len(prompt))
        engine.start("a", first_token=first)
        found = [first]
        while engine.has_work():
            found += [token for output in engine.step() for token in output.tokens]
    assert found == whole


def prefill_with(model_dir: Path, sizes: str, prompt: list[int]) -> tuple[list[bytes], int]:
    """The pages of a prompt, and the first token after it."""
    if not sizes:
        return prefilled(engine_of(ModelRunner.load(model_dir, OPTIONS)), prompt)
    with forked_group(model_dir, OPTIONS, sizes) as runner:
        return prefilled(engine_of(runner), prompt)


def prefilled(engine: PagedEngine, prompt: list[int]) -> tuple[list[bytes], int]:
    reservation = engine.reserve(make_spec("p", prompt, max_tokens=1))
    engine.start("p")
    tokens = [token for _ in range(4) for output in engine.step() for token in output.tokens]
    size, memory = engine.info.page_bytes, engine.memory
    assert isinstance(memory, memoryview)
    pages = [bytes(memory[page * size : (page + 1) * size]) for page in reservation.pages]
    return pages, tokens[0]


@pytest.mark.parametrize("cut", ["pp=2", "kv=2"])
def test_the_death_of_a_rank_is_named_and_ends_the_next_step(model_dir: Path, cut: str) -> None:
    reasons: list[str] = []
    died = threading.Event()

    def on_death(reason: str) -> None:
        reasons.append(reason)
        died.set()

    with forked_group(model_dir, OPTIONS, cut, on_death) as runner:
        engine = engine_of(runner)
        assert generate(engine, [make_spec("before", [1, 2, 3])])["before"]
        kill_rank(runner.followers.processes[0])
        assert died.wait(60)
        sizes = parse_sizes(cut)
        assert reasons == [f"rank 1 of {sizes} was killed by signal 9: the worker ends with it"]
        with pytest.raises(GroupBroken):
            generate(engine, [make_spec("after", [1, 2, 3])])


@pytest.mark.parametrize(("cut", "first"), [("tp=2", "collect"), ("pp=2", "collect"), ("tp=2", "scatter")])
def test_the_death_of_a_rank_ends_copies_of_pages(model_dir: Path, cut: str, first: str) -> None:
    died, reasons = threading.Event(), list[str]()

    def on_death(reason: str) -> None:
        reasons.append(reason)
        died.set()

    with forked_group(model_dir, OPTIONS, cut, on_death, separate_pages=True) as runner:
        engine = engine_of(runner)
        assert generate(engine, [make_spec("before", [1, 2, 3])])["before"]
        engine.reserve(make_spec("a", [1, 2, 3]))
        kill_rank(runner.followers.processes[0])
        assert died.wait(60)
        failure = f"a {first} of pages failed at rank 0"
        for move in [first, "collect", "scatter"]:
            with pytest.raises(GroupBroken, match=failure):
                engine.read_page(0) if move == "collect" else engine.receive("a", 3)
        assert [failure in reason for reason in reasons] == [False, True, True, True]
        with pytest.raises(GroupBroken, match=failure):
            generate(engine, [make_spec("after", [1, 2, 3])])


def test_a_collection_behind_the_end_of_a_group_ends_no_worker(model_dir: Path) -> None:
    """A copy for a peer may wait for its thread while the engine ends."""
    deaths: list[str] = []
    with forked_group(model_dir, OPTIONS, "tp=2", deaths.append, separate_pages=True) as runner:
        engine = engine_of(runner)
        assert len(engine.read_page(0)) == engine.info.page_bytes
        engine.close()
        with pytest.raises(GroupBroken, match="the group is closed"):
            engine.read_page(0)
    assert deaths == []
