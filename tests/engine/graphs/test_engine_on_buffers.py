"""Engines on the Triton programs, in the interpreter: plain steps, steps on fixed buffers, and steps ahead.

Their streams are the same, for greedy and seeded sequences that join and stop at random steps, also beside
sequences whose tokens need the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.core import torch_model
from libs.engine.core.engine import PagedEngine
from libs.engine.core.torch_model import TorchModel
from libs.engine.graphs.step_graphs import PlainSteps
from libs.engine.model.runner import ModelRunner
from libs.engine.step.types import SequenceSpec
from tests.engine.graphs.tiny_models import load_runner, multiply_row_by_row, write_checkpoint
from tests.engine.support import check_accounting, make_spec

N_STREAMS = 4
# One layer of four experts, two of them chosen: the interpreter takes a step in a tenth of a second.
SMALLEST = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "first_k_dense_replace": 0,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9},
    {"temperature": 1.2, "seed": 7, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 8, "presence_penalty": 0.6},
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_runner(write_checkpoint(tmp_path_factory.mktemp("tiny"), **SMALLEST), n_pages=40)


@pytest.fixture(autouse=True)
def equal_products(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_row_by_row(monkeypatch)


class Launches:
    """Plain steps, counted."""

    def __init__(self) -> None:
        self.n_replays = 0

    def capture(self, name: str, step: Any) -> Any:
        graph = PlainSteps().capture(name, step)
        replay = graph.replay

        def counted() -> None:
            self.n_replays += 1
            replay()

        graph.replay = counted  # type: ignore[method-assign]
        return graph


def make_engine(runner: ModelRunner, graphs: Launches | None, *, steps_ahead: bool = False) -> PagedEngine:
    model = TorchModel(runner, max_batch=4, max_draft_tokens=3, max_context_tokens=120, graphs=graphs)
    return PagedEngine(model, step_tokens=24, steps_ahead=steps_ahead)


def random_specs(seed: int, *, kinds: Sequence[Mapping[str, Any]]) -> list[SequenceSpec]:
    random = np.random.default_rng(seed)
    return [
        make_spec(
            str(index),
            random.integers(0, 256, int(random.integers(1, 9))).astype(np.uint32),
            max_tokens=int(random.integers(2, 5)),
            stop_token_ids=tuple(random.integers(0, 256, 20).tolist()) if index % 2 else (),
            **kinds[index % len(kinds)],
        )
        for index in range(N_STREAMS)
    ]


def run(
    engine: PagedEngine, specs: Sequence[SequenceSpec], seed: int, drafts: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Join at random steps. Drafts guess each stream's rest."""
    random = np.random.default_rng(seed)
    waiting, tokens = list(specs), {spec.seq_id: list[int]() for spec in specs}
    while waiting or engine.has_work():
        if waiting and (not engine.has_work() or random.random() < 0.4):
            spec = waiting.pop(0)
            engine.reserve(spec)
            engine.start(spec.seq_id)
        guesses = {i: list(drafts[i][len(tokens[i]) :][:3]) for i in drafts}
        for output in engine.step({i: guess for i, guess in guesses.items() if guess}):
            assert output.failure is None
            tokens[output.seq_id] += output.tokens
            if output.finish is not None:
                engine.release(output.seq_id)
        check_accounting(engine)
    assert (engine.ledger().sequences, engine.ledger().pages_held) == (0, 0)
    return tokens


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(KINDS[:4], id="on the device"),
        pytest.param(KINDS[2:], id="some on the host", marks=pytest.mark.soak),
    ],
)
def test_buffers_and_steps_ahead_change_no_token(runner: ModelRunner, kinds: list[dict[str, Any]]) -> None:
    specs = random_specs(1, kinds=kinds)
    wanted = run(make_engine(runner, None), specs, 0, {})
    assert all(wanted.values())
    on_buffers, ahead = Launches(), Launches()
    assert run(make_engine(runner, on_buffers), specs, 1, {}) == wanted
    assert on_buffers.n_replays > 0
    assert run(make_engine(runner, ahead, steps_ahead=True), specs, 2, {}) == wanted
    assert ahead.n_replays > 0


def test_drafts_on_buffers_change_no_token(runner: ModelRunner) -> None:
    """Right and wrong drafts, of different lengths, between steps ahead."""
    specs = random_specs(3, kinds=KINDS[:4])
    wanted = run(make_engine(runner, None), specs, 0, {})
    drafts = {
        seq_id: [token if at % 3 else 7 for at, token in enumerate(tokens)] if int(seq_id) % 2 else tokens
        for seq_id, tokens in wanted.items()
    }
    launches = Launches()
    assert run(make_engine(runner, launches, steps_ahead=True), specs, 1, drafts) == wanted
    assert launches.n_replays > 0


@pytest.mark.parametrize("steps_ahead", [False, True])
def test_what_began_before_an_error_ends_before_it_is_raised(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, steps_ahead: bool
) -> None:
    """The forward pass is launched and the choice of tokens fails: the pages must not be free meanwhile."""
    engine = make_engine(runner, Launches(), steps_ahead=steps_ahead)
    held_at_wait: list[int] = []

    def wait(device: torch.device) -> None:
        assert device == runner.cache.pages.device
        held_at_wait.append(engine.ledger().pages_held)
        raise RuntimeError("the device has failed before")

    def fail(*_: object) -> None:
        raise RuntimeError("the device failed")

    [spec] = random_specs(4, kinds=KINDS[:1])[:1]
    engine.reserve(spec)
    engine.start(spec.seq_id)
    engine.step()
    monkeypatch.setattr(torch_model, "wait_for_device", wait)
    assert isinstance(engine.model, TorchModel) and engine.model._decode_steps is not None
    monkeypatch.setattr(engine.model._decode_steps, "_choice_of", fail)
    with pytest.raises(RuntimeError, match="the device failed"):
        engine.step()
    assert held_at_wait == [1]
    engine.release(spec.seq_id)
    assert engine.ledger().pages_held == 0


def test_a_step_without_a_token_ends_before_its_result(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk of a prompt: its time is that of its step, and its pages may be released or read."""
    engine, n_waits = make_engine(runner, None), 0

    def wait(device: torch.device) -> None:
        nonlocal n_waits
        n_waits += 1

    monkeypatch.setattr(torch_model, "wait_for_device", wait)
    engine.reserve(make_spec("s", list(range(30)), max_tokens=2))
    engine.start("s")
    waits = []
    while engine.has_work():
        [output] = engine.step()
        waits.append((len(output.tokens), n_waits))
    assert waits == [(0, 1), (1, 1), (1, 1)], "those that read a token have waited"
    engine.release("s")
