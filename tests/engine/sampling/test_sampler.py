"""The vectorised sampler against a reference, row by row, for each parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.sampling.counter_rng import uniform
from libs.engine.sampling.device_draws import DrawParameters, samples_on_device
from libs.engine.sampling.sampler import sample
from libs.engine.step.step_model import BAD_TOKEN, SequenceRows
from libs.engine.step.types import SamplingParams
from slipstream.sampling import SAMPLING_DEFAULTS, SAMPLING_RANGES

VOCAB = 40


def make_rows(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    drafts: Sequence[int] = (),
) -> SequenceRows:
    tokens = np.array([*prompt, *output, *drafts], dtype=np.uint32)
    return SequenceRows(
        seq_id="a",
        tokens=tokens,
        pages=(),
        n_rows=1 + len(drafts),
        n_sampled=1 + len(drafts),
        n_prompt=len(prompt),
        first_index=len(output),
        params=params,
        output_counts=Counter(output),
        prompt_ids=np.unique(np.array(prompt)).astype(np.int64),
    )


def plain_sample(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], index: int
) -> int:
    """Sample one row: the reference implementation."""
    logits = row.astype(np.float32).copy()
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if index < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    for token in {*prompt, *output} if params.repetition_penalty != 1 else ():
        r = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token, count in Counter(output).items():
        logits[token] -= np.float32(params.frequency_penalty * count + params.presence_penalty)
    if params.temperature < 1e-5:
        return int(logits.argmax())
    scaled = logits / np.float32(params.temperature)
    scaled -= scaled.max()
    allowed = np.ones(len(scaled), dtype=bool)
    if params.min_p > 0:
        allowed &= scaled >= np.float32(math.log(params.min_p))
    order: list[int] = sorted(np.flatnonzero(allowed).tolist(), key=lambda t: -scaled[t])
    if params.top_k > 0:
        allowed &= scaled >= scaled[order[min(params.top_k, len(order)) - 1]]
    if params.top_p < 1:
        order = [t for t in order if allowed[t]]
        mass = np.exp(scaled[allowed].astype(np.float64)).sum()
        running = 0.0
        for token in order:
            running += math.exp(scaled[token])
            if running >= params.top_p * mass:
                allowed &= scaled >= scaled[token]
                break
    weights = np.where(allowed, np.exp(scaled.astype(np.float64)), 0.0)
    cumulated = weights.cumsum()
    return int(np.searchsorted(cumulated, uniform(params.seed, index) * cumulated[-1], side="right"))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 39, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.0, 5.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 2, 50]),
    stop_token_ids=st.sampled_from([(), (0,), (3, 5)]),
)
HISTORY = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@given(
    st.lists(
        st.tuples(PARAMS, HISTORY, HISTORY, st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1000),
    st.booleans(),
)
def test_a_batch_equals_the_reference_row_by_row(
    sequences: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    expected, blocks = [], []
    for params, prompt, output, drafts in sequences:
        logits = rng.normal(scale=2, size=(1 + len(drafts), VOCAB)).astype(np.float32)
        logits = np.round(logits) if ties else logits
        blocks.append(logits)
        for j, row in enumerate(logits):
            history = [*output, *drafts[:j]]
            expected.append(plain_sample(row, params, [1, *prompt], history, len(history)))
    rows = [
        make_rows(params, prompt=[1, *prompt], output=output, drafts=drafts)
        for params, prompt, output, drafts in sequences
    ]
    tokens, _ = sample(torch.from_numpy(np.concatenate(blocks)), rows)
    assert tokens == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.999, seed=3),
        SamplingParams(top_k=700, seed=4),
        SamplingParams(top_k=900, top_p=0.99, min_p=1e-4, seed=5),
    ],
)
def test_a_flat_distribution_over_a_large_vocabulary_is_truncated_correctly(params: SamplingParams) -> None:
    """The threshold lies beyond the sampler's first candidates."""
    row = np.random.default_rng(0).normal(scale=0.3, size=3000).astype(np.float32)
    for index in range(30):
        rows = make_rows(params, output=[1] * index)
        assert sample(torch.from_numpy(row)[None].clone(), [rows])[0] == [
            plain_sample(row, params, [1], [], index)
        ]


@pytest.mark.parametrize(("seen", "other"), [(-3.0, -5.0), (3.0, 2.0)])
def test_a_repetition_penalty_of_two_lowers_a_logit_of_either_sign(seen: float, other: float) -> None:
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, 7], logits[0, 9] = seen, other
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    for rows in (make_rows(params, prompt=[7]), make_rows(params, output=[7])):
        assert sample(logits.clone(), [rows])[0] == [9]


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(1)
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, presence_penalty=1.0, logprobs=2),
    ]
    logits = torch.from_numpy(rng.normal(size=(4, VOCAB)).astype(np.float32))
    together, _ = sample(logits.clone(), [make_rows(p, output=[2, 3]) for p in params])
    alone = [
        sample(logits[i : i + 1].clone(), [make_rows(p, output=[2, 3])])[0][0] for i, p in enumerate(params)
    ]
    assert together == alone


def test_prefill_chunks_without_samples_use_no_logits() -> None:
    rows = make_rows(SamplingParams(temperature=0.0))
    silent = SequenceRows("b", rows.tokens, (), 1, 0, 1, 0, rows.params, {}, None)
    assert sample(torch.eye(VOCAB)[5:6].clone(), [silent, rows]) == ([5], None)
    assert sample(torch.empty(0, VOCAB), [silent]) == ([], None)


def test_logprobs_are_those_of_the_raw_model() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(2, VOCAB)).astype(np.float32))
    params = SamplingParams(temperature=0.5, logit_bias={7: 100.0}, logprobs=3)
    tokens, found = sample(logits.clone(), [make_rows(params), make_rows(SamplingParams(seed=1))])
    reference = logits[0].double().log_softmax(-1)
    assert found is not None
    assert tokens[0] == 7
    assert found[1] is None
    assert found[0] is not None
    assert found[0].logprob == pytest.approx(float(reference[7]), abs=1e-5)
    best = reference.topk(3)
    assert [t for t, _ in found[0].top] == best.indices.tolist()
    assert [p for _, p in found[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_unusable_logits_give_a_bad_token_in_their_rows_only(broken: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(4, VOCAB)).astype(np.float32))
    params = [SamplingParams(seed=i, temperature=i % 2, top_p=0.9, logprobs=1) for i in range(4)]
    whole, _ = sample(logits.clone(), [make_rows(p) for p in params])
    logits[1, 3] = logits[2, 5] = broken
    tokens, _ = sample(logits, [make_rows(p) for p in params])
    assert tokens == [whole[0], BAD_TOKEN, BAD_TOKEN, whole[3]]


def test_sampling_follows_the_distribution() -> None:
    from scipy.stats import chisquare  # its import takes a second

    logits = torch.from_numpy(np.random.default_rng(3).normal(size=8).astype(np.float32))
    n = 5000
    rows = [make_rows(SamplingParams(seed=seed, temperature=0.7)) for seed in range(n)]
    tokens, _ = sample(logits.expand(n, 8).clone(), rows)
    expected = (logits.double() / 0.7).softmax(-1).numpy() * n
    assert chisquare(np.bincount(tokens, minlength=8), expected).pvalue > 1e-3


def test_uniforms_are_uniform_over_seeds_and_over_indices() -> None:
    from scipy.stats import kstest

    by_seed = [uniform(seed, 0) for seed in range(4000)]
    by_index = [uniform(5, index) for index in range(4000)]
    for draws in (by_seed, by_index):
        assert kstest(draws, "uniform").pvalue > 1e-3
        assert all(0 <= u < 1 for u in draws)
    assert abs(np.corrcoef(by_seed, by_index)[0, 1]) < 0.06
    assert uniform(2**64 + 3, 1) == uniform(3, 1) != uniform(3, 2)


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_a_graph_applies_each_parameter_or_leaves_its_rows_to_the_sampler(name: str) -> None:
    """`choose_tokens` ignores what `DrawParameters` lacks, so such rows must not reach it."""
    row = SAMPLING_RANGES[name]
    value = row.high if row.high != SAMPLING_DEFAULTS[name] else row.low
    given: dict[str, Any] = {name: int(value) if row.whole else value}
    params = replace(SamplingParams(), **given)
    applied = {each.name.removesuffix("_log") for each in fields(DrawParameters)}
    assert samples_on_device(make_rows(params, output=(1,))) is (name in applied)
