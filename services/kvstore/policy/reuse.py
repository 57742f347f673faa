"""How soon blocks of each kind are wanted again, learned while serving. Pure.

For each kind and age the model has the rate at which blocks are wanted again, from those that were and from
those that still wait. Kinds that are seen seldom have mostly the rate of the kinds like them. The value of
keeping a block is the most hits for block and time that keeping it until some age gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.history import FREE, FREQUENCY_OF_KIND, N_FREQUENCIES, N_KINDS, History, ReuseAge

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Ages: two bins an octave, up to 2^26 wanted blocks.
N_BINS = 52
_EDGES: Floats = np.concatenate(([0.0], 2.0 ** (np.arange(1, N_BINS + 1) / 2)))
_EDGE_LIST: list[float] = _EDGES.tolist()
_WIDTHS: Floats = np.diff(_EDGES)
_FREQUENCIES = np.array(FREQUENCY_OF_KIND)

# Hits that a kind needs before its own rate weighs as much as the rate of similar kinds.
_PRIOR_HITS = 2.0
# Wanted blocks between two times of learning: a part of all so far. What is learned late, few hits follow.
_MIN_LEARN_BLOCKS = 32
_MAX_LEARN_BLOCKS = 8192
_LEARN_PART = 64
# Wanted blocks after which what was seen counts half.
_MIN_HALF_LIFE_BLOCKS = 131_072


def bin_of(age: int) -> int:
    """The bin of an age."""
    return min(int(2 * math.log2(age)), N_BINS - 1) if age > 1 else 0


def bins_of(ages: Ints) -> Ints:
    """`bin_of` of many."""
    found: Ints = np.minimum((2 * np.log2(np.maximum(ages, 1))).astype(np.int64), N_BINS - 1)
    return found


class ReuseModel:
    """Learns from waits that end (`record`) and from those that go on (`learn_if_due`)."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._half_life = max(4 * history.capacity_blocks, _MIN_HALF_LIFE_BLOCKS)
        self._hits = [[0.0] * N_BINS for _ in range(N_KINDS)]
        self._ended = [[0.0] * N_BINS for _ in range(N_KINDS)]  # waits that ended at that age
        self._partial = [[0.0] * N_BINS for _ in range(N_KINDS)]  # the time they had spent in that last bin
        self._learned_at = 0
        self._learn_at = _MIN_LEARN_BLOCKS
        self.values: Floats = np.tile(1.0 / _EDGES[1:], (N_KINDS, 1))
        self.value_rows: list[list[float]] = self.values.tolist()
        self.reuse: list[float] = [0.5] * N_KINDS  # how likely a block is wanted again at all

    def record(self, waits: Iterable[ReuseAge], *, wanted: bool) -> None:
        """Waits that ended with a want, or that are forgotten."""
        for wait in waits:
            at, kind, n_blocks = bin_of(wait.age), wait.kind, wait.n_blocks
            if wanted:
                self._hits[kind][at] += n_blocks
            self._ended[kind][at] += n_blocks
            self._partial[kind][at] += n_blocks * (wait.age - _EDGE_LIST[at])

    def value(self, kind: int, age: int) -> float:
        """The value of keeping a block of that kind and age."""
        return self.value_rows[kind][bin_of(age)]

    def values_of(self, kinds: Ints, ages: Ints) -> Floats:
        """The values of many blocks."""
        found: Floats = self.values[kinds, bins_of(ages)]
        return found

    def learn_if_due(self) -> None:
        """Compute the values again, if enough blocks were wanted since the last time."""
        now = self._history.now
        if now >= self._learn_at:
            self._learn()
            self._learn_at = now + max(min(now // _LEARN_PART, _MAX_LEARN_BLOCKS), _MIN_LEARN_BLOCKS)

    def _learn(self) -> None:
        history = self._history
        decay = 0.5 ** ((history.now - self._learned_at) / self._half_life)
        self._learned_at = history.now
        hits, ended, partial = (decay * np.array(c) for c in (self._hits, self._ended, self._partial))
        self._hits, self._ended, self._partial = hits.tolist(), ended.tolist(), partial.tolist()
        kinds = np.array(history.kind)
        remembered = np.flatnonzero(kinds != FREE)
        ages = history.now - np.array(history.last)[remembered]
        at = bins_of(ages)
        flat = kinds[remembered] * N_BINS + at
        waiting = np.bincount(flat, minlength=hits.size).reshape(hits.shape)
        partial += np.bincount(flat, weights=ages - _EDGES[at], minlength=hits.size).reshape(hits.shape)
        ended += waiting
        passed = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
        rates = _rates(hits, passed * _WIDTHS + partial)
        self.values, self.reuse = _best_density(rates)
        self.value_rows = self.values.tolist()


def _rates(hits: Floats, exposure: Floats) -> Floats:
    """The rate at which a block is wanted, by kind and age.

    Rates of a kind with few observations are near those of all kinds of its frequency, these near those of
    all kinds, and these near 1/age, by which blocks are in LRU's order.
    """
    base = 1.0 / _EDGES[1:]
    every = (hits.sum(axis=0) + 1.0) / (exposure.sum(axis=0) + 1.0 / base)
    like_hits, like_exposure = np.zeros((N_FREQUENCIES, N_BINS)), np.zeros((N_FREQUENCIES, N_BINS))
    np.add.at(like_hits, _FREQUENCIES, hits)
    np.add.at(like_exposure, _FREQUENCIES, exposure)
    like = (like_hits + _PRIOR_HITS) / (like_exposure + _PRIOR_HITS / every)
    rates: Floats = (hits + _PRIOR_HITS) / (exposure + _PRIOR_HITS / like[_FREQUENCIES])
    return rates


def _best_density(rates: Floats) -> tuple[Floats, list[float]]:
    """(the best hits for time from each bin on, the chance to be wanted again at all)."""
    step = rates * _WIDTHS
    end = np.exp(-np.cumsum(step, axis=1))  # still waiting at the end of the bin
    zeros = np.zeros((len(rates), 1))
    ended = np.concatenate((zeros + 1.0, end[:, :-1]), axis=1) - end
    hits = np.concatenate((zeros, np.cumsum(ended, axis=1)), axis=1)
    time = np.concatenate((zeros, np.cumsum(ended / rates, axis=1)), axis=1)
    # By bin and then kind, so that each operation reads and writes memory in its order.
    both, best = np.ascontiguousarray([hits.T, time.T]), np.ascontiguousarray(rates.T)
    for n_bins in range(1, N_BINS + 1):
        gained, spent = both[:, n_bins:] - both[:, :-n_bins]
        of_all = best[: N_BINS + 1 - n_bins]
        np.maximum(of_all, gained / np.maximum(spent, 1e-300), out=of_all)
    return np.ascontiguousarray(best.T), hits[:, -1].tolist()
