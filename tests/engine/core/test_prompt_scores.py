"""Log probabilities of a prompt's tokens against the plain log-softmax of all logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import build_fake_engine
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.sampling import prompt_scoring
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.prompt_scores import PromptScores
from libs.engine.step.types import SequenceSpec
from tests.engine.support import Transcript, drive, make_spec
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

BLOCK = 8
PROMPT = np.random.default_rng(5).integers(0, 256, 61).astype(np.uint32)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, RandomCheckpoint(dtype="float32"))
    return path


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> torch.Tensor:
    """Log probabilities of all tokens after each row of the prompt, computed in one pass."""
    options = RunnerOptions(n_pages=16, block_tokens=BLOCK, kernels="torch", threads=1)
    n, runner = len(PROMPT), ModelRunner.load(model_dir, options)
    rows = np.arange(n, dtype=np.int32)
    batch = ForwardBatch(
        token_ids=PROMPT.astype(np.int32),
        positions=rows,
        query_start=np.array([0, n], np.int32),
        context_len=np.array([n], np.int32),
        page_table=np.arange(8, dtype=np.int32)[None],
        logit_rows=rows,
    )
    return torch.log_softmax(runner.forward(batch).logits, dim=-1)


def make_engine(model_dir: Path, **options: object) -> PagedEngine:
    given = {"n_pages": 400, "block_tokens": BLOCK, "kernels": "torch", "threads": 1, **options}
    return build_engine(model_dir, EngineOptions(**given))  # type: ignore[arg-type]


def run(engine: PagedEngine, *specs: SequenceSpec) -> Transcript:
    for spec in specs:
        engine.reserve(spec)
        engine.start(spec.seq_id)
    transcript = drive(engine)
    for spec in specs:
        engine.release(spec.seq_id)
    return transcript


def scores_of(transcript: Transcript, seq_id: str) -> list[PromptScores]:
    return [o.scores for o in transcript.outputs if o.seq_id == seq_id and o.scores is not None]


def check(pieces: list[PromptScores], prompt: np.ndarray, expected: torch.Tensor, *, top: int) -> None:
    """Every prompt token but the first has one row, in order, with the reference's values."""
    position = 1
    for piece in pieces:
        assert piece.first == position
        rows = expected[position - 1 : position - 1 + len(piece)]
        tokens = torch.from_numpy(prompt[position : position + len(piece)].astype(np.int64))[:, None]
        own = rows.gather(-1, tokens)
        np.testing.assert_allclose(piece.logprobs, own[:, 0].numpy(), atol=TOLERANCE)
        assert piece.ranks.tolist() == (1 + (rows > own).sum(-1)).tolist()
        assert piece.top_ids.shape == (len(piece), top)
        assert piece.top_ids.tolist() == rows.topk(top).indices.tolist()
        np.testing.assert_allclose(piece.top_logprobs, rows.topk(top).values.numpy(), atol=TOLERANCE)
        position += len(piece)
    assert position == len(prompt)


@pytest.mark.parametrize("step_tokens", [4, 7, 8, 60, 61, 512])
def test_rows_equal_the_reference_for_any_chunks(
    model_dir: Path, reference: torch.Tensor, step_tokens: int
) -> None:
    engine = make_engine(model_dir, step_tokens=step_tokens, max_batch=4)
    transcript = run(engine, make_spec("a", PROMPT, prompt_logprobs=3))
    pieces = scores_of(transcript, "a")
    assert len(pieces) == -(-(len(PROMPT) - 1) // step_tokens)
    check(pieces, PROMPT, reference, top=3)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_each_sequence_gets_as_many_tokens_as_it_asks_for(
    model_dir: Path, reference: torch.Tensor, top: int
) -> None:
    """Beside another one that asks for more, and one that asks for none."""
    engine = make_engine(model_dir, step_tokens=24)
    specs = [
        make_spec("a", PROMPT, prompt_logprobs=top),
        make_spec("b", PROMPT[:30], prompt_logprobs=20),
        make_spec("c", PROMPT[:9]),
    ]
    transcript = run(engine, *specs)
    check(scores_of(transcript, "a"), PROMPT, reference, top=top)
    check(scores_of(transcript, "b"), PROMPT[:30], reference, top=20)
    assert not scores_of(transcript, "c")


def test_the_sampling_of_an_answer_changes_no_row(model_dir: Path, reference: torch.Tensor) -> None:
    engine = make_engine(model_dir)
    spec = make_spec(
        "a", PROMPT, prompt_logprobs=2, temperature=1.7, repetition_penalty=1.9, logit_bias={3: 50.0}
    )
    check(scores_of(run(engine, spec), "a"), PROMPT, reference, top=2)


def test_a_cached_prefix_is_computed_again_and_others_use_it(
    model_dir: Path, reference: torch.Tensor
) -> None:
    engine = make_engine(model_dir, step_tokens=16)
    run(engine, make_spec("before", PROMPT))
    spec = make_spec("a", PROMPT, prompt_logprobs=1)
    assert engine.reserve(spec).cached_tokens == 0
    engine.start("a")
    check(scores_of(drive(engine), "a"), PROMPT, reference, top=1)
    engine.release("a")
    fresh = make_engine(model_dir)
    run(fresh, make_spec("a", PROMPT, prompt_logprobs=1))
    assert fresh.reserve(make_spec("after", PROMPT)).cached_tokens == 56


def test_prompts_that_run_together_share_no_rows_with_one_that_is_scored(
    model_dir: Path, reference: torch.Tensor
) -> None:
    """The scored prompt neither copies blocks of its siblings nor waits for them."""
    engine = make_engine(model_dir, step_tokens=16, max_batch=4)
    plain, scored = make_spec("plain", PROMPT), make_spec("scored", PROMPT, prompt_logprobs=4)
    transcript = run(engine, plain, scored)
    check(scores_of(transcript, "scored"), PROMPT, reference, top=4)
    assert transcript.tokens["plain"] == transcript.tokens["scored"]


def test_logits_of_a_few_rows_exist_at_once(
    model_dir: Path, reference: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model_dir)
    vocab_size, seen = engine.info.vocab_size, list[int]()
    score = prompt_scoring.score_rows

    def watch(logits: torch.Tensor, tokens: torch.Tensor, *, top: int) -> tuple[np.ndarray, ...]:
        seen.append(len(logits))
        return score(logits, tokens, top=top)

    monkeypatch.setattr(prompt_scoring, "MAX_LOGITS_BYTES", 4 * vocab_size * 7 + 3)
    monkeypatch.setattr(prompt_scoring, "score_rows", watch)
    transcript = run(engine, make_spec("a", PROMPT, prompt_logprobs=3))
    assert seen == [7] * 8 + [4]
    check(scores_of(transcript, "a"), PROMPT, reference, top=3)


def test_rows_of_a_prompt_and_its_answer_equal_those_of_decoding(model_dir: Path) -> None:
    engine = make_engine(model_dir, step_tokens=16)
    first = run(engine, make_spec("a", PROMPT, logprobs=2, temperature=1.0, seed=3))
    answer, decoded = first.tokens["a"], [p for o in first.outputs for p in o.logprobs or ()]
    whole = np.concatenate([PROMPT, np.array(answer, np.uint32)])
    pieces = scores_of(run(engine, make_spec("b", whole, prompt_logprobs=2, max_tokens=1)), "b")
    found = np.concatenate([piece.logprobs for piece in pieces])[-len(answer) :]
    np.testing.assert_allclose(found, [p.logprob for p in decoded], atol=TOLERANCE)
    ids = np.concatenate([piece.top_ids for piece in pieces])[-len(answer) :]
    assert ids.tolist() == [[token for token, _ in p.top] for p in decoded]


def test_tokens_of_an_earlier_attempt_are_no_part_of_the_prompt() -> None:
    engine = build_fake_engine(block_tokens=BLOCK, step_tokens=16)
    spec = replace(make_spec("a", PROMPT[:20], prompt_logprobs=1), emitted=(7, 8, 9))
    assert sum(map(len, scores_of(run(engine, spec), "a"))) == 19


def test_a_prompt_of_one_token_has_no_rows() -> None:
    engine = build_fake_engine(block_tokens=BLOCK)
    assert not scores_of(run(engine, make_spec("a", [3], prompt_logprobs=1)), "a")


def test_rows_that_are_not_finite_fail_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_fake_engine(block_tokens=BLOCK)
    fake = engine.model.run

    def broken(*arguments: object) -> object:
        result = fake(*arguments)  # type: ignore[arg-type]
        if result.scores is not None:
            result.scores.logprobs[3] = np.nan
        return result

    monkeypatch.setattr(engine.model, "run", broken)
    last = run(engine, make_spec("a", PROMPT, prompt_logprobs=1)).last["a"]
    assert last.failure is not None and "not finite" in last.failure.message
