"""A sequence ends at the first of: a stop token past min_tokens, max_tokens, the context window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.engine.sampling.stop_conditions import cut_at_stop
from libs.engine.step.types import FinishReason, SamplingParams


def ends(
    tokens: list[int], params: SamplingParams, *, output: int = 0, context: int = 10, window: int = 100
) -> tuple[tuple[int, ...], FinishReason | None]:
    return cut_at_stop(tokens, params, n_output_tokens=output, n_tokens=context, max_context_tokens=window)


STOP = SamplingParams(stop_token_ids=(7, 9), max_tokens=5)


def test_each_stop_condition_ends_a_sequence() -> None:
    assert ends([1, 2], STOP) == ((1, 2), None)
    assert ends([1, 9, 3], STOP) == ((1, 9), "stop")
    assert ends([1, 2, 3], STOP, output=3) == ((1, 2), "length")
    assert ends([1, 7], STOP, output=3) == ((1, 7), "stop")
    assert ends([1, 2, 3], STOP, context=98) == ((1, 2), "length")


def test_ignored_and_early_stop_tokens_do_not_stop() -> None:
    ignoring = SamplingParams(stop_token_ids=(7,), ignore_eos=True, max_tokens=5)
    assert ends([7, 7], ignoring) == ((7, 7), None)
    late = SamplingParams(stop_token_ids=(7,), min_tokens=2, max_tokens=5)
    assert ends([7, 7, 7], late) == ((7, 7, 7), "stop")


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12), st.lists(st.integers(1, 4), min_size=12))
def test_truncation_does_not_depend_on_the_grouping_of_tokens(
    tokens: list[int], max_tokens: int, sizes: list[int]
) -> None:
    params = SamplingParams(stop_token_ids=(3,), min_tokens=2, max_tokens=max_tokens)
    whole = ends(tokens, params)
    pieces: list[int] = []
    finish = None
    for size in sizes:
        group, tokens = tokens[:size], tokens[size:]
        kept, finish = ends(group, params, output=len(pieces), context=10 + len(pieces))
        pieces += kept
        if finish:
            break
    assert (tuple(pieces), finish) == whole
