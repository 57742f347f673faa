"""In which order a prefill worker serves its prompts: it works by this rule, routers count by it. Pure.

The one that needs least goes first, of equals the one that came first, so that a short prompt is not stuck
behind a long one. A prompt that was kept waiting for PATIENCE times what it needs itself is overdue, and the
oldest of those is sure of a share of the work, so that none starves: patience is a matter of what one asks.
"""

from __future__ import annotations

PATIENCE = 4
OVERDUE_SHARE = 4  # the oldest that is overdue is sure of 1 / 4 of what a step has for prompts


def order_key(needs_tokens: int, arrival: int) -> tuple[int, int]:
    """Sorts prompts by turn. `needs_tokens`: left to compute; `arrival`: rises from prompt to prompt."""
    return needs_tokens, arrival


def goes_before(theirs_tokens: int, ours_tokens: int) -> bool:
    """Whether a prompt that is there is served before one that comes now: by `order_key`, where of equals the
    one that came first is."""
    return theirs_tokens <= ours_tokens


def is_overdue(waited_tokens: float, needs_tokens: float) -> bool:
    """Whether a prompt has waited long enough. `waited_tokens`: computed for others since it could run."""
    return waited_tokens >= PATIENCE * needs_tokens
