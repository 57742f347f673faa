"""Speculation is lossless: with drafts, sampling emits the same tokens as without."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.sampling.sampler import sample
from libs.engine.sampling.verify import count_accepted
from libs.engine.step.step_model import SequenceRows
from libs.engine.step.types import SamplingParams

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(TOKENS, st.data())
def test_accepted_drafts_are_the_longest_prefix_that_was_sampled(
    sampled: list[int], data: st.DataObject
) -> None:
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=len(sampled) - 1, max_size=len(sampled) - 1))
    accepted = count_accepted(drafts, sampled)
    assert drafts[:accepted] == sampled[:accepted]
    assert accepted == len(drafts) or drafts[accepted] != sampled[accepted]


@functools.cache
def _logits_after(first: int, second: int, vocab_size: int) -> torch.Tensor:
    rng = np.random.default_rng(1 + first + 2 * second)
    return torch.from_numpy(rng.normal(size=vocab_size)).float()


def markov_logits(history: list[int], vocab_size: int) -> torch.Tensor:
    """A toy language model: its logits depend on the last two tokens."""
    return _logits_after(history[-2], history[-1], vocab_size)


def rows_for(history: list[int], drafts: list[int], params: SamplingParams, n_prompt: int) -> SequenceRows:
    tokens = np.array([*history, *drafts], dtype=np.uint32)
    counts: dict[int, int] = {}
    for token in history[n_prompt:]:
        counts[token] = counts.get(token, 0) + 1
    return SequenceRows(
        seq_id="a",
        tokens=tokens,
        pages=(),
        n_rows=1 + len(drafts),
        n_sampled=1 + len(drafts),
        n_prompt=n_prompt,
        first_index=len(history) - n_prompt,
        params=params,
        output_counts=counts,
        prompt_ids=np.unique(tokens[:n_prompt]).astype(np.int64),
    )


def generate(seeds: Sequence[int], n: int, draft_kind: str, **params: float) -> list[list[int]]:
    """`n` tokens of the toy model for each seed, all in the same steps.

    `draft_kind` says whether it has no drafts, three right ones, three wrong ones or three random ones.
    """
    vocab_size, prompt = 5, [1, 2]
    samplings = [SamplingParams(seed=seed, max_tokens=n, **params) for seed in seeds]  # type: ignore[arg-type]
    guesses = [np.random.default_rng(seed + 77) for seed in seeds]
    plain = generate(seeds, n, "none", **params) if draft_kind in ("right", "wrong") else [[] for _ in seeds]
    histories = [list(prompt) for _ in seeds]
    while running := [i for i, history in enumerate(histories) if len(history) - len(prompt) < n]:
        drafts: list[list[int]] = []
        for i in running:
            done = len(histories[i]) - len(prompt)
            if draft_kind == "random":
                drafts.append(guesses[i].integers(0, vocab_size, 3).tolist())
            else:
                shift = 1 if draft_kind == "wrong" else 0
                drafts.append([(token + shift) % vocab_size for token in plain[i][done : done + 3]])
        rows = [
            rows_for(histories[i], draft, samplings[i], len(prompt))
            for i, draft in zip(running, drafts, strict=True)
        ]
        contexts = [
            histories[i] + draft[:j]
            for i, draft in zip(running, drafts, strict=True)
            for j in range(len(draft) + 1)
        ]
        sampled, _ = sample(torch.stack([markov_logits(c, vocab_size) for c in contexts]), rows)
        start = 0
        for i, draft in zip(running, drafts, strict=True):
            own = sampled[start : start + len(draft) + 1]
            histories[i] += own[: count_accepted(draft, own) + 1]
            start += len(own)
    return [history[len(prompt) :][:n] for history in histories]


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.7, "presence_penalty": 0.6, "repetition_penalty": 1.3},
    ],
    ids=["greedy", "sampled", "filtered-and-penalised"],
)
def test_text_is_identical_with_any_drafts(kind: str, params: dict[str, float]) -> None:
    assert generate(range(20), 12, kind, **params) == generate(range(20), 12, "none", **params)


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_sampling_with_drafts_has_the_target_distribution(kind: str) -> None:
    """Pairs of tokens over many seeds against the exact joint distribution; seeds are fixed."""
    from scipy.stats import chisquare  # its import takes a second

    vocab_size, n_draws = 5, 2000
    counts = np.zeros((vocab_size, vocab_size))
    for first, second in generate(range(n_draws), 2, kind):
        counts[first, second] += 1
    p_first = markov_logits([1, 2], vocab_size).double().softmax(-1).numpy()
    p_second = [markov_logits([1, 2, t], vocab_size).double().softmax(-1).numpy() for t in range(vocab_size)]
    expected = np.stack([p * row for p, row in zip(p_first, p_second, strict=True)]) * n_draws
    assert chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-3
