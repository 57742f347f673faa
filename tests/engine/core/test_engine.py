"""Contracts of the engine's calls, on the fake model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libs.common.block_hash import chain_hashes
from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import build_fake_engine, expected_tokens
from libs.engine.step.step_model import BAD_TOKEN
from libs.engine.step.types import FEATURE_WINDOW_TOKENS, FullBlock, SamplingParams
from slipstream.errors import (
    ContextExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfPages,
)
from tests.engine.support import check_accounting, drive, generate, make_spec

BLOCK = 4
LONG = list(range(1, 19))


@pytest.fixture
def engine() -> PagedEngine:
    return build_fake_engine(n_pages=32, block_tokens=BLOCK, vocab_size=50, max_context_tokens=64)


def test_each_full_block_is_reported_once_in_order_with_its_chain_hash(engine: PagedEngine) -> None:
    spec = replace(make_spec("a", LONG, max_tokens=9), root=b"r" * 16, salt=b"tenant")
    pages = engine.reserve(spec).pages
    engine.start("a")
    transcript = drive(engine)
    tokens = LONG + transcript.tokens["a"]
    computed = transcript.last["a"].computed_tokens
    assert computed == len(tokens) - 1
    hashes = chain_hashes(tokens[:computed], root=b"r" * 16, salt=b"tenant", block_tokens=BLOCK)
    assert [b.hash for b in transcript.blocks("a")] == hashes
    assert [b.page for b in transcript.blocks("a")][:4] == list(pages[:4])


def test_hashes_of_the_request_are_used_and_continued(engine: PagedEngine) -> None:
    hashes = chain_hashes(LONG, root=b"r" * 16, salt=b"s", block_tokens=BLOCK)
    given = replace(make_spec("a", LONG), root=b"r" * 16, salt=b"s", block_hashes=tuple(hashes))
    generate(engine, [given])
    computed = replace(given, seq_id="b", block_hashes=())
    assert engine.reserve(computed).cached_tokens == 16


def test_a_cached_prefix_is_reused_up_to_the_last_token(engine: PagedEngine) -> None:
    first = generate(engine, [make_spec("a", LONG[:16])])
    reservation = engine.reserve(make_spec("b", LONG[:16]))
    assert reservation.cached_tokens == 12
    engine.start("b")
    assert engine.ledger().prefill_tokens_waiting == 4
    assert drive(engine).tokens["b"] == first["a"]


def test_tenants_and_models_never_share_blocks(engine: PagedEngine) -> None:
    generate(engine, [make_spec("a", LONG)])
    for i, other in enumerate(({"salt": b"other"}, {"root": b"x" * 16})):
        spec = replace(make_spec(f"b{i}", LONG), **other)  # type: ignore[arg-type]
        assert engine.reserve(spec).cached_tokens == 0


def test_blocks_of_a_running_sequence_are_shared_at_once(engine: PagedEngine) -> None:
    a = engine.reserve(make_spec("a", LONG))
    engine.start("a")
    engine.step()
    b = engine.reserve(make_spec("b", LONG))
    assert b.pages[:4] == a.pages[:4]
    assert b.cached_tokens == 16
    assert not set(b.pages[4:]) & set(a.pages)
    engine.release("a")
    engine.start("b")
    drive(engine)


def test_the_block_of_a_filled_contexts_last_token_is_not_shared_before_it_is_computed(
    engine: PagedEngine,
) -> None:
    """The first step writes this block again, so no other sequence may read it."""
    engine.reserve(make_spec("a", LONG[:16]))
    engine.fill("a", 16)
    assert engine.reserve(make_spec("b", LONG)).cached_tokens == 12


def test_a_resumed_sequence_gives_the_same_tokens_as_an_uninterrupted_one(engine: PagedEngine) -> None:
    params = SamplingParams(seed=5, max_tokens=12)
    whole = expected_tokens(engine, LONG, params, n=12)
    for n_emitted in (1, 5, 11):
        spec = replace(make_spec(f"r{n_emitted}", LONG), sampling=params, emitted=tuple(whole[:n_emitted]))
        found = generate(engine, [spec])
        assert found[spec.seq_id] == whole[n_emitted:]


def test_prefill_only_stops_after_one_token_and_keeps_its_pages(engine: PagedEngine) -> None:
    reservation = engine.reserve(replace(make_spec("a", LONG), prefill_only=True))
    engine.start("a")
    (output,) = engine.step()
    assert len(output.tokens) == 1
    assert output.finish is None
    assert output.computed_tokens == len(LONG)
    assert not engine.has_work()
    assert engine.ledger().pages_held == len(reservation.pages)
    engine.release("a")
    assert engine.ledger().pages_held == 0


def test_a_first_token_of_a_handoff_can_end_the_sequence(engine: PagedEngine) -> None:
    engine.reserve(make_spec("a", LONG, stop_token_ids=(7,)))
    engine.fill("a", len(LONG))
    engine.start("a", first_token=7)
    (output,) = engine.step()
    assert (output.tokens, output.finish) == ((), "stop")
    assert not engine.has_work()


def test_a_stop_token_among_accepted_drafts_ends_the_sequence() -> None:
    engine = build_fake_engine(block_tokens=BLOCK, next_token=lambda history, _: len(history))
    engine.reserve(make_spec("a", LONG, stop_token_ids=(20,)))
    engine.start("a")
    assert engine.step()[0].tokens == (18,)
    (output,) = engine.step({"a": [19, 20, 21]})
    assert (output.tokens, output.finish) == ((19, 20), "stop")
    assert (output.accepted_drafts, output.computed_tokens) == (2, 20)
    assert output.features is not None
    assert len(output.features) == 2


def test_drafts_never_reach_beyond_max_tokens_or_the_vocabulary(engine: PagedEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    right = expected_tokens(engine, LONG, params, n=8)
    engine.reserve(make_spec("a", LONG, max_tokens=3))
    engine.start("a")
    engine.step()
    (output,) = engine.step({"a": right[1:8]})
    assert output.proposed_drafts == 1
    assert (output.tokens, output.finish) == (tuple(right[1:3]), "length")
    engine.reserve(make_spec("b", LONG))
    engine.start("b")
    engine.step()
    (output,) = engine.step({"b": [right[1], 50, -1]})
    assert output.proposed_drafts == 1


def test_features_cover_the_last_window_and_pair_with_the_next_token() -> None:
    engine = build_fake_engine(step_tokens=200, n_pages=64)
    prompt = (np.arange(900) % 1000).astype(np.uint32)
    engine.reserve(make_spec("a", prompt))
    engine.start("a")
    transcript = drive(engine)
    with_features = [o for o in transcript.outputs if o.features is not None]
    first = with_features[0]
    tokens = [*prompt.tolist(), *transcript.tokens["a"]]
    assert first.features is not None
    assert first.features.shape == (FEATURE_WINDOW_TOKENS, 8)
    assert first.feature_start == 900 - FEATURE_WINDOW_TOKENS
    position = first.feature_start
    for output in with_features:
        assert output.feature_start == position
        assert output.features is not None
        assert output.feature_tokens is not None
        rows = len(output.features)
        assert output.feature_tokens.tolist() == tokens[position + 1 : position + 1 + rows]
        position += rows
    assert position == len(tokens) - 1


def test_pinned_pages_outlive_their_sequence(engine: PagedEngine) -> None:
    reservation = engine.reserve(make_spec("a", LONG))
    engine.start("a")
    drive(engine)
    engine.pin(reservation.pages)
    engine.pin(reservation.pages[:1])
    engine.release("a")
    assert engine.ledger().pages_held == engine.ledger().pinned_pages == len(reservation.pages)
    engine.unpin(reservation.pages)
    assert engine.ledger().pages_held == 1
    engine.unpin(reservation.pages[:1])
    assert engine.ledger().pages_held == 0
    with pytest.raises(FailedPrecondition):
        engine.unpin(reservation.pages[:1])


def test_decoding_without_a_free_page_fails_only_the_youngest_sequence() -> None:
    engine = build_fake_engine(n_pages=8, block_tokens=BLOCK, max_context_tokens=64)
    for seq_id in ("old", "young"):
        engine.reserve(replace(make_spec(seq_id, LONG[:12], max_tokens=18), salt=seq_id.encode()))
        engine.start(seq_id)
    transcript = drive(engine)
    assert isinstance(transcript.last["young"].failure, OutOfPages)
    assert transcript.last["old"].finish == "length"
    params = SamplingParams(temperature=0)
    for seq_id in ("old", "young"):
        got = transcript.tokens[seq_id]
        assert got == expected_tokens(engine, LONG[:12], params, n=18)[: len(got)]


def test_a_failed_sequence_keeps_its_pages_until_its_release() -> None:
    """A reader may still read or pin the pages."""
    engine = build_fake_engine(n_pages=8, block_tokens=BLOCK, max_context_tokens=64)
    for seq_id in "ab":
        engine.reserve(replace(make_spec(seq_id, LONG[:12], max_tokens=18), salt=seq_id.encode()))
        engine.start(seq_id)
    while not any(o.failure for o in engine.step()):
        pass
    for _ in range(3):
        assert engine.step() == []
        assert engine.ledger().pages_held == 8
    engine.release("b")
    assert [o.seq_id for o in engine.step()] == ["a"]


def test_a_free_page_goes_to_a_waiting_sequence_before_new_ones() -> None:
    engine = build_fake_engine(n_pages=7, block_tokens=BLOCK, max_batch=2, step_tokens=2)
    for seq_id, prompt in (("a", [1, 2, 3]), ("b", LONG[:16]), ("c", [9])):
        engine.reserve(make_spec(seq_id, prompt, max_tokens=3))
    engine.start("a")
    engine.step()
    engine.step()
    engine.start("b")
    assert [o.seq_id for o in engine.step()] == ["a", "b"]
    assert [o.seq_id for o in engine.step()] == ["b"], "a waits for its second page"
    engine.release("c")
    with pytest.raises(OutOfPages):
        engine.reserve(make_spec("d", [9]))
    outputs = {o.seq_id: o for o in engine.step()}
    assert outputs["a"].finish == "length"


def test_a_sequence_with_bad_logits_fails_alone_and_its_blocks_leave_the_cache() -> None:
    def breaks_after_20(history: np.ndarray, params: SamplingParams) -> int:
        return BAD_TOKEN if len(history) > 20 and params.seed == 1 else 3

    engine = build_fake_engine(block_tokens=BLOCK, next_token=breaks_after_20, row_bytes=1024)
    for seq_id, seed in (("good", 0), ("bad", 1)):
        engine.reserve(replace(make_spec(seq_id, LONG, seed=seed, max_tokens=6), salt=seq_id.encode()))
        engine.start(seq_id)
    transcript = drive(engine)
    assert isinstance(transcript.last["bad"].failure, Internal)
    assert transcript.tokens["bad"] == [3, 3, 3]
    assert transcript.last["good"].finish == "length"
    kept = {name: [block.hash for block in transcript.blocks(name)] for name in ("good", "bad")}
    assert any(engine._features.newest([block], 1) is not None for block in kept["good"])
    assert kept["bad"] and all(engine._features.newest([block], 1) is None for block in kept["bad"])
    again = make_spec("again", LONG)
    assert engine.reserve(replace(again, salt=b"bad")).cached_tokens == 0
    engine.release("again")
    assert engine.reserve(replace(again, salt=b"good")).cached_tokens == 16


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (make_spec("a", []), "prompt"),
        (make_spec("a", [50]), "prompt"),
        (make_spec("a", [1] * 64), "prompt"),
        (make_spec("a", [1], max_tokens=0), "max_tokens"),
        (make_spec("a", [1], logit_bias={50: 1.0}), "logit_bias"),
        (make_spec("a", [1], stop_token_ids=(-1,)), "stop_token_ids"),
        (replace(make_spec("a", [1], max_tokens=2), emitted=(1, 2)), "max_tokens"),
        (replace(make_spec("a", [1]), emitted=(50,)), "prompt"),
    ],
)
def test_invalid_sequences_are_refused(engine: PagedEngine, spec: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        engine.reserve(spec)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert engine.ledger().pages_free == 32


def test_calls_in_the_wrong_state_are_refused(engine: PagedEngine) -> None:
    with pytest.raises(NotFound):
        engine.start("a")
    engine.reserve(make_spec("a", LONG))
    with pytest.raises(FailedPrecondition):
        engine.reserve(make_spec("a", LONG))
    with pytest.raises(FailedPrecondition):
        engine.start("a", first_token=1)
    engine.fill("a", 10)
    for n_tokens in (9, len(LONG) + 1):
        with pytest.raises(FailedPrecondition):
            engine.fill("a", n_tokens)
    engine.start("a")
    with pytest.raises(FailedPrecondition):
        engine.fill("a", 11)
    with pytest.raises(FailedPrecondition):
        engine.start("a")
    engine.release("unknown")


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    engine = build_fake_engine(n_pages=2, block_tokens=BLOCK, max_context_tokens=64)
    with pytest.raises(InvalidArgument):
        engine.reserve(make_spec("a", [1] * 8))


def test_a_prompt_beyond_the_context_has_the_error_that_clients_know(engine: PagedEngine) -> None:
    with pytest.raises(ContextExceeded, match="prompt is too long"):
        engine.reserve(make_spec("a", [1] * 64))


def test_step_without_work_does_nothing(engine: PagedEngine) -> None:
    assert engine.step() == []
    assert not engine.has_work()


def test_blocks_are_pinned_by_hash() -> None:
    """A reused page is not pinned for its former block."""
    engine = build_fake_engine(block_tokens=4, n_pages=6)
    engine.reserve(make_spec("a", range(17), max_tokens=1))
    engine.start("a")
    blocks = drive(engine).blocks("a")
    assert len(blocks) == 4
    assert engine.pin_blocks(blocks[:2]) == tuple(blocks[:2])
    engine.release("a")
    # Two pages stay pinned; all others are another sequence's now.
    engine.reserve(make_spec("b", range(100, 112)))
    assert engine.pin_blocks(blocks[1:]) == (blocks[1],)
    assert engine.ledger().pinned_pages == 2
    engine.unpin([b.page for b in blocks[:2]])
    engine.unpin([blocks[1].page])
    engine.release("b")
    check_accounting(engine)
    assert engine.ledger().pages_held == 0
    # The same block computed into another page: the page in the prefix cache is pinned.
    moved = FullBlock(blocks[0].hash, 5 - blocks[0].page)
    assert engine.pin_blocks([moved]) == (blocks[0],)


def test_pages_of_a_reservation_with_late_writes_are_replaced() -> None:
    engine = build_fake_engine(n_pages=8, block_tokens=4)
    engine.reserve(make_spec("a", LONG[:11]))
    before = engine.reserve(make_spec("b", LONG[:11]))
    late = list(before.pages[1:])
    engine.fill("b", 4)
    engine.pin(late)
    after = engine.exchange("b", late)
    assert after.pages[0] == before.pages[0] and not set(after.pages) & set(late)
    for pages in (late, before.pages[:1]):  # no longer of this reservation; already filled
        with pytest.raises(FailedPrecondition):
            engine.exchange("b", list(pages))
    with pytest.raises(OutOfPages):
        engine.exchange("b", list(after.pages[1:]))
    engine.release("a")
    engine.release("b")
    engine.unpin(late)
    engine.check()
    assert engine.ledger().pages_held == 0
