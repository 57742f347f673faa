"""The fake engine is as strict as the real one, and stricter about KV bytes."""

from __future__ import annotations

import numpy as np
import pytest

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import build_fake_engine, expected_tokens
from libs.engine.step.types import PageReservation, SamplingParams, SequenceSpec, StepOutput
from slipstream.errors import DataCorrupt
from tests.support.host_memory import host_memory

PROMPT = np.arange(100, dtype=np.uint32) * 7 % 1000


def make_spec(seq_id: str = "a", *, n: int = 8, prefill_only: bool = False, **params: object) -> SequenceSpec:
    sampling = SamplingParams(max_tokens=n, **params)  # type: ignore[arg-type]
    return SequenceSpec(seq_id=seq_id, prompt=PROMPT, sampling=sampling, prefill_only=prefill_only)


def run(engine: PagedEngine, drafts: dict[str, list[int]] | None = None) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs += engine.step(drafts or {})
        engine.check()
    return outputs


def texts(outputs: list[StepOutput]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in outputs:
        found.setdefault(output.seq_id, []).extend(output.tokens)
    return found


def copy_pages(
    source: PagedEngine, taken: PageReservation, target: PagedEngine, given: PageReservation
) -> None:
    size = source.info.page_bytes
    first = given.cached_tokens // source.info.block_tokens
    for a, b in list(zip(taken.pages, given.pages, strict=True))[first:]:
        host_memory(target)[b * size : (b + 1) * size] = host_memory(source)[a * size : (a + 1) * size]


def test_tokens_are_a_function_of_history_and_seed() -> None:
    engine = build_fake_engine()
    for seq_id, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine.reserve(make_spec(seq_id, seed=seed))
        engine.start(seq_id)
    found = texts(run(engine))
    assert found["a"] == found["b"] == expected_tokens(engine, PROMPT.tolist(), SamplingParams(seed=1), n=8)
    assert found["a"] != found["c"]


def test_a_prompt_in_small_chunks_gives_the_same_tokens() -> None:
    whole, chunked = build_fake_engine(), build_fake_engine(step_tokens=7, max_batch=4)
    for engine in (whole, chunked):
        engine.reserve(make_spec())
        engine.start("a")
    outputs = run(chunked)
    assert texts(outputs) == texts(run(whole))
    assert [o.computed_tokens for o in outputs[:3]] == [7, 14, 21]


def test_right_drafts_save_steps_and_change_nothing() -> None:
    engine = build_fake_engine()
    params = SamplingParams(temperature=0, max_tokens=9)
    right = expected_tokens(engine, PROMPT.tolist(), params, n=9)
    engine.reserve(SequenceSpec("a", PROMPT, params))
    engine.start("a")
    (first,) = engine.step()
    (second,) = engine.step({"a": right[1:4]})
    assert (second.tokens, second.accepted_drafts, second.proposed_drafts) == (tuple(right[1:5]), 3, 3)
    (third,) = engine.step({"a": [right[5], 999, right[7]]})
    assert (third.tokens, third.accepted_drafts) == (tuple(right[5:7]), 1)
    assert [*first.tokens, *second.tokens, *third.tokens, *texts(run(engine))["a"]] == right


def test_handed_over_pages_continue_the_text() -> None:
    prefill, decode = build_fake_engine(), build_fake_engine()
    taken = prefill.reserve(make_spec(prefill_only=True))
    prefill.start("a")
    (first,) = run(prefill)
    assert not prefill.has_work()
    given = decode.reserve(make_spec())
    copy_pages(prefill, taken, decode, given)
    decode.fill("a", len(PROMPT))
    decode.start("a", first_token=first.tokens[0], features=first.features)
    outputs = run(decode)
    text = [*first.tokens, *texts(outputs)["a"]]
    assert text == expected_tokens(decode, PROMPT.tolist(), SamplingParams(), n=8)
    assert outputs[0].features is not None
    assert outputs[0].feature_tokens is not None
    assert outputs[0].feature_start == 0
    assert outputs[0].feature_tokens.tolist() == [*PROMPT[1:].tolist(), *text[:2]]


@pytest.mark.parametrize("position", [0, 63, 64, 99])
def test_a_wrong_byte_is_refused(position: int) -> None:
    prefill, decode = build_fake_engine(), build_fake_engine()
    taken = prefill.reserve(make_spec(prefill_only=True))
    prefill.start("a")
    (first,) = run(prefill)
    given = decode.reserve(make_spec())
    copy_pages(prefill, taken, decode, given)
    size, row = decode.info.page_bytes, decode.info.page_bytes // decode.info.block_tokens
    at = given.pages[position // 64] * size + position % 64 * row + 5
    host_memory(decode)[at] ^= 1
    decode.fill("a", len(PROMPT))
    decode.start("a", first_token=first.tokens[0])
    with pytest.raises(DataCorrupt):
        decode.step()


def test_pace_goes_to_the_injected_sleep() -> None:
    slept: list[float] = []
    engine = build_fake_engine(pace_s_per_token=0.5, sleep=slept.append)
    engine.reserve(make_spec(n=3))
    engine.start("a")
    run(engine)
    assert slept == [50.0, 0.5, 0.5]
