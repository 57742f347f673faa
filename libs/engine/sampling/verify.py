"""Verifies drafts: how many leading ones are accepted. Pure.

Row j of a sequence was computed and sampled with drafts[:j] in its history, so its token is valid exactly if
these drafts are. The token at index i is a pure function of (logits, history, seed, i). So the emitted tokens
equal those of sampling without drafts, for greedy and sampled text alike. (This equals rejection sampling
with a one-hot proposal: P(accept d) = p(d).)
"""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """The number n of leading drafts that equal the tokens sampled at their places.

    `sampled` has one token more than `drafts`. The sequence emits sampled[: n + 1]: the accepted drafts, then
    the correction, or the bonus token if all were accepted.
    """
    for j, draft in enumerate(drafts):
        if sampled[j] != draft:
            return j
    return len(drafts)
