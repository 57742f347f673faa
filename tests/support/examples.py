"""The number of examples of a property test whose examples take long."""

from __future__ import annotations

from hypothesis import settings

# That of the profile of `make test`.
USUAL_EXAMPLES = 50


def examples(n_usual: int) -> int:
    """So many in `make test`, and in `make soak` ten times as many, as of other property tests."""
    return n_usual * settings().max_examples // USUAL_EXAMPLES
