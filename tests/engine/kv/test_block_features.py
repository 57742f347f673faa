"""Features by block: the newest run without a gap, within a bound of bytes."""

from __future__ import annotations

import numpy as np

from libs.engine.core.fake import build_fake_engine
from libs.engine.kv.block_features import BlockFeatures
from libs.engine.step.types import FloatArray, SamplingParams, SequenceSpec, StepOutput

BLOCK_TOKENS, WIDTH = 4, 8
BLOCK_BYTES = BLOCK_TOKENS * WIDTH * 4


def rows(value: float) -> FloatArray:
    return np.full((BLOCK_TOKENS, WIDTH), value, np.float32)


def test_the_newest_blocks_without_a_gap_are_found() -> None:
    features = BlockFeatures(10 * BLOCK_BYTES)
    for name in (b"a", b"c", b"d"):
        features.put(name, rows(name[0]))
    found = features.newest([b"a", b"b", b"c", b"d"], 8)
    assert found is not None and found[:, 0].tolist() == [99.0] * 4 + [100.0] * 4
    newest = features.newest([b"c", b"d"], 1)
    assert newest is not None and np.unique(newest).tolist() == [100.0]
    assert features.newest([b"a", b"b"], 8) is None
    assert features.newest([], 8) is None


def test_the_least_recently_used_blocks_go() -> None:
    features = BlockFeatures(2 * BLOCK_BYTES)
    features.put(b"a", rows(1))
    features.put(b"b", rows(2))
    assert features.newest([b"a"], 1) is not None
    features.put(b"c", rows(3))
    assert features.n_bytes == 2 * BLOCK_BYTES
    assert features.newest([b"b"], 1) is None and features.newest([b"a"], 1) is not None


def test_blocks_that_are_dropped_free_their_bytes() -> None:
    features = BlockFeatures(10 * BLOCK_BYTES)
    for name in (b"a", b"b"):
        features.put(name, rows(name[0]))
    features.drop([b"a", b"x", b"a"])
    assert features.n_bytes == BLOCK_BYTES
    assert features.newest([b"a"], 1) is None and features.newest([b"b"], 1) is not None
    features.put(b"a", rows(7))
    found = features.newest([b"a"], 1)
    assert found is not None and np.unique(found).tolist() == [7.0]


def prompt_output(engine, tokens: list[int], seq_id: str, **step: bool) -> StepOutput:  # type: ignore[no-untyped-def]
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    engine.reserve(SequenceSpec(seq_id, np.array(tokens, np.uint32), sampling))
    engine.start(seq_id)
    output: StepOutput
    (output,) = engine.step({}, **step)
    engine.release(seq_id)
    return output


def test_a_reused_prefix_gives_the_features_of_its_first_use() -> None:
    engine = build_fake_engine(n_pages=1024, block_tokens=BLOCK_TOKENS, row_bytes=1024)
    tokens = list(range(1, 40))
    whole = prompt_output(engine, tokens, "first")
    again = prompt_output(engine, [*tokens[:30], 7, 8, 9], "second")  # seven blocks are reused
    assert again.features is not None and whole.features is not None
    assert (again.feature_start, len(again.features)) == (0, 33)
    np.testing.assert_array_equal(again.features[:30], whole.features[:30])
    assert again.feature_tokens is not None
    assert again.feature_tokens[:32].tolist() == [*tokens[1:30], 7, 8, 9]


def test_a_step_without_features_leaves_no_older_ones() -> None:
    engine = build_fake_engine(n_pages=1024, block_tokens=BLOCK_TOKENS, row_bytes=1024)
    tokens = list(range(1, 40))
    prompt_output(engine, tokens, "first")
    assert prompt_output(engine, tokens, "second", features=False).features is None


def test_a_prefix_copied_from_a_running_prompt_has_its_features() -> None:
    engine = build_fake_engine(n_pages=1024, block_tokens=BLOCK_TOKENS, row_bytes=1024, step_tokens=32)
    tokens = list(range(1, 60))
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    for seq_id in ("leader", "follower"):
        engine.reserve(SequenceSpec(seq_id, np.array(tokens, np.uint32), sampling))
        engine.start(seq_id)
    n_rows: dict[str, tuple[int, int]] = {}
    shared = 0
    for _ in range(10):
        for output in engine.step({}):
            shared += output.shared_tokens
            if output.features is not None:
                n_rows.setdefault(output.seq_id, (output.feature_start, len(output.features)))
    assert shared > 0, "nothing was copied"
    assert n_rows == {"leader": (0, 59), "follower": (0, 59)}


def test_steps_without_a_row_of_a_sequence_that_wants_features_compute_none() -> None:
    engine = build_fake_engine(n_pages=64, block_tokens=BLOCK_TOKENS)
    for seq_id, start in (("wanting", 1), ("other", 100)):
        tokens = np.arange(start, start + 20, dtype=np.uint32)
        engine.reserve(SequenceSpec(seq_id, tokens, SamplingParams(temperature=0.0, max_tokens=9)))
    engine.want_features("other", wanted=False)
    engine.want_features("unknown", wanted=False)
    engine.start("other")
    assert [output.features is None for output in engine.step()] == [True]
    engine.start("wanting")
    found = {output.seq_id: output.features is not None for output in engine.step()}
    assert found["wanting"], "a step has features for all of its rows"
    engine.want_features("wanting", wanted=False)
    assert all(output.features is None for output in engine.step())
    engine.want_features("other", wanted=True)
    assert any(output.features is not None for output in engine.step())
