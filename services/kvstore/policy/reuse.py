"""What a block is worth: how soon blocks of its kind were wanted again, learned while serving. Pure.

Time is counted in wanted blocks, as cache pressure is: nothing ages while nobody asks. A kind is what
was known when a run was last wanted: how often that was, the gap before, whether it began a session or
went on with one, how long the chain was, whether it was its last block. For each kind and age, the model
has the rate at which blocks were wanted again; of kinds that were seen seldom, mostly the rate of the
kinds like them. The value of keeping a block is the best hits per block and time that any way to go on
keeping it gives: the index of Gittins (1979) for a stopping problem. LHD (Beckmann, Chen, Cidon, NSDI 2018)
ranks by a similar density, with sampled victims and kinds of another sort.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.runs import Columns

Floats = npt.NDArray[np.float64]

# Ages: two bins an octave, up to 2^26 wanted blocks.
N_BINS = 52
EDGES: Floats = np.concatenate(([0.0], 2.0 ** (np.arange(1, N_BINS + 1) / 2)))
WIDTHS: Floats = np.diff(EDGES)

N_FREQUENCIES = 7
N_GAPS = 8
N_SESSIONS = 3
N_LENGTHS = 4
N_COARSE = N_FREQUENCIES * N_SESSIONS
_FINE = N_GAPS * N_LENGTHS * 2  # kinds of one frequency and session
N_KINDS = N_COARSE * _FINE

# Hits that a kind needs before it is believed as much as the kinds like it.
PRIOR_HITS = 20.0
_FREQUENCY_BUCKET = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4) + (5,) * 22
NEW_SESSION, FIRST_TURN_AFTER, LATER_TURN = 0, 1, 2
# A run wanted more often than this is shared: what hangs on it begins something of its own.
SHARED_FREQUENCY = 16


def session_kind(parent_frequency: int) -> int:
    """What a new run is, from how often the run before it was wanted, this time included; 0 = no parent."""
    if not 0 < parent_frequency <= SHARED_FREQUENCY:
        return NEW_SESSION
    return FIRST_TURN_AFTER if parent_frequency == 2 else LATER_TURN


def kind_of(frequency: int, gap: int, session: int, chain_blocks: int, last: bool) -> int:
    """0 to N_KINDS - 1. `gap`: wanted blocks since the want before, 0 for the first."""
    fb = _FREQUENCY_BUCKET[frequency] if frequency < 32 else N_FREQUENCIES - 1
    gb = min(max((gap.bit_length() - 7) // 2, 0) + 1, N_GAPS - 1) if frequency > 1 else 0
    lb = min(max((chain_blocks.bit_length() - 2) // 2, 0), N_LENGTHS - 1)
    return (((fb * N_SESSIONS + session) * N_GAPS + gb) * N_LENGTHS + lb) * 2 + last


def bin_of(age: int) -> int:
    """The bin of an age."""
    return min(int(2 * math.log2(age)), N_BINS - 1) if age > 1 else 0


class ReuseModel:
    """Learns from wants (`record`) and from what is not wanted (`learn`); tells the value of keeping."""

    def __init__(self, *, half_life: float) -> None:
        """`half_life`: wanted blocks after which what was seen counts half."""
        self._half_life = half_life
        self._hits = np.zeros((N_KINDS, N_BINS))
        self._ended = np.zeros((N_KINDS, N_BINS))  # blocks whose wait ended at that age
        self._partial = np.zeros((N_KINDS, N_BINS))  # time they had spent in that last bin
        self._known = np.zeros(N_KINDS, np.bool_)  # kinds of which anything was ever counted
        self._learned_at = 0
        self.values: Floats = np.tile(1.0 / (EDGES[:-1] + WIDTHS), (N_KINDS, 1))
        self.reuse: Floats = np.full(N_KINDS, 0.5)

    @property
    def memory_bytes(self) -> int:
        """Memory of its tables, in bytes."""
        arrays = (self._hits, self._ended, self._partial, self.values, self.reuse)
        return sum(int(array.nbytes) for array in arrays)

    def record(self, kind: int, age: int, n_blocks: int, *, wanted: bool) -> None:
        """Blocks of that kind were wanted again at that age, or forgotten at it."""
        at = bin_of(age)
        self._known[kind] = True
        if wanted:
            self._hits[kind, at] += n_blocks
        self._ended[kind, at] += n_blocks
        self._partial[kind, at] += n_blocks * (age - EDGES[at])

    def learn(self, columns: Columns, now: int) -> None:
        """Take the ages of all remembered runs into account and compute the values anew."""
        decay = 0.5 ** ((now - self._learned_at) / self._half_life)
        self._learned_at = now
        kind, ages, weight = np.array(columns.kind), now - np.array(columns.last), np.array(columns.n)
        self._known[kind] = True
        known = np.flatnonzero(self._known)  # few of all kinds; of the others nothing but zeros is counted
        for counts in (self._hits, self._ended, self._partial):
            counts[known] *= decay
        hits = self._hits[known]
        at, place = bins_of(ages), np.cumsum(self._known) - 1
        flat = place[kind] * N_BINS + at
        shape, size = hits.shape, hits.size
        waiting = np.bincount(flat, weights=weight, minlength=size).reshape(shape)
        partial = np.bincount(flat, weights=weight * (ages - EDGES[at]), minlength=size).reshape(shape)
        ended = self._ended[known] + waiting
        passed = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
        exposure = passed * WIDTHS + self._partial[known] + partial
        coarse = _coarse(hits, exposure, known // _FINE)
        seen = exposure.any(axis=1)
        rate = (hits[seen] + PRIOR_HITS) / (exposure[seen] + PRIOR_HITS / coarse[known[seen] // _FINE])
        values, reuse = _best_density(np.concatenate((coarse, rate)))
        self.values = np.repeat(values[:N_COARSE], _FINE, axis=0)
        self.reuse = np.repeat(reuse[:N_COARSE], _FINE)
        self.values[known[seen]], self.reuse[known[seen]] = values[N_COARSE:], reuse[N_COARSE:]

    def value_of(self, kind: int, age: int) -> float:
        """Expected hits a block and wanted block, if it is kept as long as that is best."""
        return float(self.values[kind, bin_of(age)])


def bins_of(ages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`bin_of` for many."""
    bins = (2 * np.log2(np.maximum(ages, 1))).astype(np.int64)
    return np.minimum(bins, N_BINS - 1)


def _coarse(hits: Floats, exposure: Floats, coarse_kind: npt.NDArray[np.int64]) -> Floats:
    """Rates of being wanted by frequency, session and age; behind them all stands 1/age. Of kinds' hits and
    exposures, and the coarse kind of each."""
    # Nothing known at all: a block is the less likely to be wanted the longer it was not, as LRU has it.
    base = 0.3 / (EDGES[:-1] + WIDTHS)
    every = (hits.sum(axis=0) + 1.0) / (exposure.sum(axis=0) + 1.0 / base)
    coarse_hits, coarse_exposure = np.zeros((N_COARSE, N_BINS)), np.zeros((N_COARSE, N_BINS))
    np.add.at(coarse_hits, coarse_kind, hits)
    np.add.at(coarse_exposure, coarse_kind, exposure)
    coarse: Floats = (coarse_hits + PRIOR_HITS) / (coarse_exposure + PRIOR_HITS / every)
    return coarse


def _best_density(rate: Floats) -> tuple[Floats, Floats]:
    """(the best hits for time from each bin on, the chance to be wanted again at all), from rates."""
    step = rate * WIDTHS
    end = np.exp(-np.cumsum(step, axis=1))  # still waiting at the end of the bin
    start = np.concatenate((np.ones((len(rate), 1)), end[:, :-1]), axis=1)
    hits = np.concatenate((np.zeros((len(rate), 1)), np.cumsum(start - end, axis=1)), axis=1)
    # Time spent in the bin by those who were waiting at its start: (1 - e^-x) / rate.
    time = np.concatenate((np.zeros((len(rate), 1)), np.cumsum((start - end) / rate, axis=1)), axis=1)
    values = np.empty_like(rate)
    for at in range(N_BINS):
        spent = np.maximum(time[:, at + 1 :] - time[:, at : at + 1], 1e-300)
        values[:, at] = ((hits[:, at + 1 :] - hits[:, at : at + 1]) / spent).max(axis=1)
    return np.maximum(values, rate), hits[:, -1]  # the rate itself is the value of keeping it this bin
