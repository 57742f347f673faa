"""The order in which a prefill worker serves its prompts. Workers apply it, routers predict with it. Pure.

The prompt that needs the fewest tokens goes first; of equals, the one that arrived first. So a short prompt
is not stuck behind a long one. A prompt that waited for PATIENCE times its own tokens is overdue. The oldest
overdue prompt gets a share of every step, so no prompt starves.
"""

from __future__ import annotations

PATIENCE = 4
OVERDUE_SHARE = 4  # the oldest overdue prompt gets 1 / 4 of a step's prefill tokens


def order_key(needs_tokens: int, arrival: int) -> tuple[int, int]:
    """The sort key of a prompt with `needs_tokens` left to compute. `arrival` rises from prompt to prompt."""
    return needs_tokens, arrival


def goes_before(theirs_tokens: int, ours_tokens: int) -> bool:
    """Whether a waiting prompt is served before one that arrives now, by `order_key`."""
    return theirs_tokens <= ours_tokens


def is_overdue(waited_tokens: float, needs_tokens: float) -> bool:
    """Whether a prompt is overdue. `waited_tokens` were computed for other prompts while it waited."""
    return waited_tokens >= PATIENCE * needs_tokens
