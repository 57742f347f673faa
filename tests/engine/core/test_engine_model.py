"""The engine with a tiny random model in fp32: chunking and batching change no token."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.engine.core.engine import PagedEngine
from libs.engine.eagle.drafter import DrafterEngine
from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import SamplingParams, SequenceSpec, StepOutput
from slipstream.errors import InvalidArgument, OutOfPages
from tests.engine.random_head import RandomHead, write_random_head
from tests.engine.support import Draft, check_accounting, drive, generate, make_spec
from tests.support.host_memory import host_memory
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

BLOCK = 8
# A dense layer and one of experts: the second one reads what chunks and batches make of the first one's KV.
N_LAYERS = 2
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 256, n).astype(np.uint32) for n in (1, 7, 8, 9, 30, 64, 65)]
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "seed": 12, "top_p": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]
SPECS = [
    make_spec(f"p{i}k{k}", prompt, **kind) for i, prompt in enumerate(PROMPTS) for k, kind in enumerate(KINDS)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = TINY_CONFIG | {"num_hidden_layers": N_LAYERS}
    write_random_checkpoint(path, RandomCheckpoint(config=config, dtype="float32"))
    return path


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    write_random_head(path, RandomHead(draft_vocab_size=200))
    return path


def make_engine(model_dir: Path, **options: object) -> PagedEngine:
    given = {"n_pages": 400, "block_tokens": BLOCK, "kernels": "torch", "threads": 1, **options}
    return build_engine(model_dir, EngineOptions(**given))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def small_engine(model_dir: Path) -> PagedEngine:
    """An engine with short pages, whose cache keeps the blocks of earlier examples."""
    return make_engine(model_dir, n_pages=30, step_tokens=24, max_batch=4)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> dict[str, list[int]]:
    """The reference: each sequence alone, its prompt in one step, nothing cached."""
    engine = make_engine(model_dir)
    tokens: dict[str, list[int]] = {}
    for i, spec in enumerate(SPECS):
        tokens |= generate(engine, [replace(spec, salt=bytes([i]))])
    return tokens


def test_blocks_copied_from_siblings_change_no_token(
    model_dir: Path, reference: dict[str, list[int]]
) -> None:
    """All sequences reserve pages before any step, so shared blocks are copied, not found."""
    engine = make_engine(model_dir, step_tokens=24, max_batch=9)
    for spec in SPECS:
        engine.reserve(spec)
    for spec in SPECS:
        engine.start(spec.seq_id)
    transcript = drive(engine)
    assert transcript.tokens == reference
    longest = len(PROMPTS[-1])
    assert (
        sum(o.shared_tokens for o in transcript.outputs if o.seq_id == "p6k2")
        == (longest - 1) // BLOCK * BLOCK
    )


def test_continuous_batching_equals_one_at_a_time(model_dir: Path, reference: dict[str, list[int]]) -> None:
    engine = make_engine(model_dir, step_tokens=100, max_batch=9)
    found: dict[str, list[int]] = {}
    for wave in (SPECS[:5], SPECS[5:12], SPECS[12:]):
        for spec in wave:
            engine.reserve(spec)
            engine.start(spec.seq_id)
        for _ in range(3):
            for output in engine.step():
                found.setdefault(output.seq_id, []).extend(output.tokens)
    for seq_id, tokens in drive(engine).tokens.items():
        found.setdefault(seq_id, []).extend(tokens)
    assert found == reference


@pytest.mark.parametrize("step_tokens", [1, 5, 8, 64])
def test_any_chunk_size_gives_the_same_tokens(
    model_dir: Path, reference: dict[str, list[int]], step_tokens: int
) -> None:
    engine = make_engine(model_dir, step_tokens=step_tokens, max_batch=1)
    assert generate(engine, SPECS[-6:]) == {s.seq_id: reference[s.seq_id] for s in SPECS[-6:]}


def test_longer_steps_of_a_long_prompt_give_the_same_tokens(model_dir: Path) -> None:
    """Beyond 64 tokens a step of 8 rows becomes one of 32, unless another sequence decodes."""
    spec = make_spec("long", np.random.default_rng(5).integers(0, 256, 200).tolist())
    whole = generate(make_engine(model_dir, kernels="native"), [spec])
    engine = make_engine(model_dir, kernels="native", step_tokens=8, max_batch=4)
    engine.reserve(spec)
    engine.start("long")
    transcript = drive(engine)
    assert transcript.tokens == whole
    assert transcript.steps == 8 + 5 + 11  # 64 tokens by 8, 136 by 32, then those after the first answer


def test_a_cached_prefix_gives_the_same_tokens(model_dir: Path, reference: dict[str, list[int]]) -> None:
    engine = make_engine(model_dir)
    for _ in range(2):
        for spec in SPECS:
            assert generate(engine, [spec])[spec.seq_id] == reference[spec.seq_id]
    assert engine.reserve(SPECS[-1]).cached_tokens == 64


def test_a_second_turn_continues_from_generated_blocks(model_dir: Path) -> None:
    spec = make_spec("turn 1", PROMPTS[4], max_tokens=30)
    engine = make_engine(model_dir)
    answer = generate(engine, [spec])["turn 1"]
    second = make_spec("turn 2", [*PROMPTS[4].tolist(), *answer, 5, 6, 7])
    assert engine.reserve(second).cached_tokens == 56
    engine.start("turn 2")
    fresh = make_engine(model_dir)
    assert drive(engine).tokens["turn 2"] == generate(fresh, [second])["turn 2"]


def test_kv_from_a_handoff_gives_the_same_tokens(model_dir: Path, reference: dict[str, list[int]]) -> None:
    prefill, decode = make_engine(model_dir, step_tokens=16), make_engine(model_dir)
    size = prefill.info.page_bytes
    for spec in SPECS:
        source = prefill.reserve(replace(spec, prefill_only=True))
        prefill.start(spec.seq_id)
        first = drive(prefill).tokens[spec.seq_id]
        target = decode.reserve(spec)
        for a, b in zip(source.pages, target.pages, strict=True):
            if target.pages.index(b) * BLOCK >= target.cached_tokens:
                page = host_memory(prefill)[a * size : (a + 1) * size]
                host_memory(decode)[b * size : (b + 1) * size] = page
        decode.fill(spec.seq_id, len(spec.prompt))
        decode.start(spec.seq_id, first_token=first[0])
        assert first + drive(decode).tokens[spec.seq_id] == reference[spec.seq_id]
        prefill.release(spec.seq_id)
        decode.release(spec.seq_id)


@pytest.mark.parametrize("n_emitted", [1, 6, 11])
def test_a_resumed_sequence_continues_with_the_same_tokens(
    model_dir: Path, reference: dict[str, list[int]], n_emitted: int
) -> None:
    engine = make_engine(model_dir)
    specs = [replace(s, emitted=tuple(reference[s.seq_id][:n_emitted])) for s in SPECS]
    assert generate(engine, specs) == {s.seq_id: reference[s.seq_id][n_emitted:] for s in SPECS}


def test_a_sequence_that_runs_out_of_pages_fails_with_a_typed_error_and_resumes(
    model_dir: Path, reference: dict[str, list[int]]
) -> None:
    engine = make_engine(model_dir, n_pages=6)
    specs = [replace(SPECS[3], seq_id=name, salt=name.encode()) for name in ("a", "b", "c")]
    specs = [replace(s, sampling=replace(s.sampling, max_tokens=24)) for s in specs]
    for spec in specs:
        engine.reserve(spec)
        engine.start(spec.seq_id)
    transcript = drive(engine)
    assert [transcript.last[s].finish for s in "abc"] == ["length", None, None]
    for seq_id in "bc":
        assert isinstance(transcript.last[seq_id].failure, OutOfPages)
        engine.release(seq_id)
    engine.release("a")
    resumed = replace(specs[1], emitted=tuple(transcript.tokens["b"]))
    assert transcript.tokens["b"] + generate(engine, [resumed])["b"] == transcript.tokens["a"]
    assert transcript.tokens["a"][:12] == reference[SPECS[3].seq_id]


def test_aborting_at_any_step_frees_all_pages_and_changes_no_other_sequence(
    model_dir: Path, reference: dict[str, list[int]]
) -> None:
    engine = make_engine(model_dir, n_pages=60, step_tokens=24, max_batch=8)
    keep = SPECS[14]
    for abort_at in range(0, 16, 3):
        engine.reserve(keep)
        engine.start(keep.seq_id)
        for spec in SPECS[15:18]:
            engine.reserve(spec)
            engine.start(spec.seq_id)
        found: list[int] = []
        for _ in range(abort_at):
            found += [t for o in engine.step() if o.seq_id == keep.seq_id for t in o.tokens]
        for spec in SPECS[15:18]:
            engine.release(spec.seq_id)
        check_accounting(engine)
        found += drive(engine).tokens.get(keep.seq_id, [])
        assert found == reference[keep.seq_id]
        engine.release(keep.seq_id)
        assert engine.ledger().pages_held == 0


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["start", "step", "step", "step", "release"]), st.integers(0, len(SPECS) - 1)),
    min_size=5,
    max_size=40,
)


@settings(max_examples=20, deadline=None)
@given(operations=OPERATIONS)
def test_any_order_of_calls_gives_the_same_tokens_and_frees_all_pages(
    small_engine: PagedEngine, reference: dict[str, list[int]], operations: list[tuple[str, int]]
) -> None:
    engine, running = small_engine, dict[str, list[int]]()
    for operation, index in operations:
        spec = SPECS[index]
        if operation == "release":
            engine.release(spec.seq_id)
            running.pop(spec.seq_id, None)
        elif operation == "start" and spec.seq_id not in running:
            with contextlib.suppress(OutOfPages):
                engine.reserve(spec)
                engine.start(spec.seq_id)
                running[spec.seq_id] = []
        elif operation == "step":
            for output in engine.step():
                running[output.seq_id] += output.tokens
        check_accounting(engine)
    for seq_id, tokens in running.items():
        assert tokens == reference[seq_id][: len(tokens)]
        engine.release(seq_id)
    ledger = engine.ledger()
    assert (ledger.sequences, ledger.pages_held) == (0, 0)


# ---- speculation


class LocalDrafts:
    """A local drafter that reads only the engine's outputs."""

    def __init__(self, drafter: DrafterEngine, n_drafts: int) -> None:
        self.drafter, self.n_drafts = drafter, n_drafts

    def __call__(self, outputs: Sequence[StepOutput]) -> Mapping[str, Sequence[int]]:
        for o in outputs:
            if o.features is not None and o.feature_tokens is not None:
                self.drafter.extend_batch(
                    [ContextRows(o.seq_id, o.feature_start, o.feature_tokens, o.features)]
                )
        return self.drafter.propose_batch([o.seq_id for o in outputs if not o.finish], self.n_drafts)


def garbage(outputs: Sequence[StepOutput]) -> Mapping[str, Sequence[int]]:
    rng = np.random.default_rng(len(outputs))
    return {s.seq_id: rng.integers(-3, 300, 4).tolist() for s in SPECS} | {"unknown": [1]}


class Oracle:
    """Drafts that are right, right for the position before, or right but for one token."""

    def __init__(self, truth: Mapping[str, list[int]], kind: str) -> None:
        self.truth, self.kind = truth, kind
        self.done: dict[str, int] = {}

    def __call__(self, outputs: Sequence[StepOutput]) -> Mapping[str, Sequence[int]]:
        drafts = {}
        for o in outputs:
            self.done[o.seq_id] = self.done.get(o.seq_id, 0) + len(o.tokens)
        for seq_id, done in self.done.items():
            start = max(done - 1, 0) if self.kind == "stale" else done
            drafts[seq_id] = self.truth[seq_id][start : start + 5]
            if self.kind == "half" and len(drafts[seq_id]) > 2:
                drafts[seq_id][2] = (drafts[seq_id][2] + 1) % 256
        return drafts


@pytest.mark.parametrize("kind", ["garbage", "right", "half", "stale", "head"])
def test_text_is_identical_with_drafts_of_any_kind(
    model_dir: Path, head_dir: Path, reference: dict[str, list[int]], kind: str
) -> None:
    engine = make_engine(model_dir, draft_model_dir=head_dir, step_tokens=90, max_batch=30)
    draft: Draft
    if kind == "garbage":
        draft = garbage
    elif kind == "head":
        draft = LocalDrafts(build_drafter(head_dir, model_dir), 3)
    else:
        draft = Oracle(reference, kind)
    for spec in SPECS:
        engine.reserve(spec)
        engine.start(spec.seq_id)
    transcript = drive(engine, draft)
    assert transcript.tokens == reference
    accepted = sum(o.accepted_drafts for o in transcript.outputs)
    proposed = sum(o.proposed_drafts for o in transcript.outputs)
    assert proposed > 0
    if kind == "right":
        assert accepted == proposed
        assert transcript.steps < 20
    if kind == "half":
        assert 0 < accepted < proposed


def test_greedy_text_is_identical_with_head_drafts_over_many_prompts(model_dir: Path, head_dir: Path) -> None:
    rng = np.random.default_rng(99)
    prompts = [rng.integers(0, 256, rng.integers(1, 40)).astype(np.uint32) for _ in range(200)]
    specs = [make_spec(f"q{i}", prompt, max_tokens=8) for i, prompt in enumerate(prompts)]
    engine = make_engine(model_dir, draft_model_dir=head_dir, n_pages=1600, max_batch=64)
    plain = generate(engine, [replace(s, salt=b"other") for s in specs])
    for spec in specs:
        engine.reserve(spec)
        engine.start(spec.seq_id)
    transcript = drive(engine, LocalDrafts(build_drafter(head_dir, model_dir), 3))
    assert transcript.tokens == plain
    # The head is random, so any accepted draft is enough.
    assert sum(o.proposed_drafts for o in transcript.outputs) > len(specs)


def test_features_do_not_depend_on_chunks(model_dir: Path, head_dir: Path) -> None:
    found = []
    for step_tokens in (7, 512):
        engine = make_engine(model_dir, draft_model_dir=head_dir, step_tokens=step_tokens, max_batch=1)
        engine.reserve(make_spec("a", PROMPTS[-1]))
        engine.start("a")
        transcript = drive(engine)
        first = next(o for o in transcript.outputs if o.tokens)
        assert first.feature_start == 0
        assert first.features is not None
        found.append(first.features)
    assert found[0].shape == (65, 64)
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_a_head_for_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    write_random_head(tmp_path, RandomHead(vocab_size=300, draft_vocab_size=300))
    with pytest.raises(InvalidArgument, match="draft_model_dir"):
        make_engine(model_dir, draft_model_dir=tmp_path)


def test_logprobs_come_with_every_token(model_dir: Path) -> None:
    engine = make_engine(model_dir)
    spec = SequenceSpec("a", PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=5, logprobs=2))
    engine.reserve(spec)
    engine.start("a")
    quiet = make_spec("b", PROMPTS[3], max_tokens=5)
    engine.reserve(quiet)
    engine.start("b")
    transcript = drive(engine)
    assert [len(transcript.tokens[name]) for name in "ab"] == [5, 5]
    for output in transcript.outputs:
        if output.seq_id == "b":
            assert output.logprobs is None
            continue
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.tokens)
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            assert logprob.top[0][0] == token
            assert logprob.top[0][1] == pytest.approx(logprob.logprob)


def test_the_cache_has_the_asked_size(model_dir: Path) -> None:
    page_bytes = N_LAYERS * BLOCK * 40 * 4
    engine = make_engine(model_dir, n_pages=None, kv_memory_bytes=10 * page_bytes + 5)
    assert (engine.info.n_pages, engine.info.page_bytes) == (10, page_bytes)
    assert len(host_memory(engine)) == 10 * page_bytes
    with pytest.raises(InvalidArgument):
        make_engine(model_dir, kv_memory_bytes=1 << 20)
    with pytest.raises(InvalidArgument, match=f"less than one block of {BLOCK} tokens: {page_bytes} bytes"):
        make_engine(model_dir, n_pages=None, kv_memory_bytes=page_bytes - 1)
