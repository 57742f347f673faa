"""Speculation's one decision: how many drafts hold. Pure.

Row j of a sequence was computed with drafts[:j] as its history and sampled as if they were true, so
its token counts exactly when they are. Because the token at index i is a pure function of (logits,
history, seed, i), this emits the very tokens that sampling without drafts emits: lossless for greedy
and sampled text alike. (It equals rejection sampling with a one-hot proposal: P(accept d) = p(d).)
"""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Leading drafts that equal the token sampled in their place. len(sampled) == len(drafts) + 1.

    What is emitted is sampled[: n + 1]: these, and the correction, or the bonus when all hold.
    """
    for j, draft in enumerate(drafts):
        if sampled[j] != draft:
            return j
    return len(drafts)
