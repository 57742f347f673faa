"""In which order a prefill worker serves its prompts: it works by this rule, routers count by it. Pure.

The one that needs least goes first, of equals the one that came first, so that a short prompt is not stuck
behind a long one; the oldest is sure of a share whatever it needs, so that none starves.
"""

from __future__ import annotations

OLDEST_SHARE = 4  # the oldest is sure of 1 / 4 of what a step has for prompts


def order_key(needs_tokens: int, arrival: int) -> tuple[int, int]:
    """Sorts prompts by turn. `needs_tokens`: left to compute; `arrival`: rises from prompt to prompt."""
    return needs_tokens, arrival


def goes_before(theirs_tokens: int, ours_tokens: int) -> bool:
    """Whether a prompt that is there is served before one that comes now."""
    return order_key(theirs_tokens, 0) < order_key(ours_tokens, 1)
