"""Whether prompts compute draft features: only while some reader of handoffs asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libs.engine.step.types import StepOutput

# Readers in a row without a wish, after which prompts compute no features. They are a tenth of a prompt's
# time on the shipped model, and a gate that stays closed never reads them.
UNASKED_HANDOFFS = 16


class FeatureDemand:
    """Implements `libs.worker.engine.engine_thread.DraftSource` without drafts; `ask` is for the event loop.

    The first reader that asks again gets no rows, or few: its sequence begins without draft context.
    """

    def __init__(self) -> None:
        self._unasked = 0

    def ask(self, draft_rows: int) -> None:
        """A reader of a handoff needs so many rows."""
        self._unasked = 0 if draft_rows else self._unasked + 1

    @property
    def wants_features(self) -> bool:
        return self._unasked < UNASKED_HANDOFFS

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """See `DraftSource`."""
        return {}

    def stepped(self, outputs: Sequence[StepOutput]) -> None:
        """See `DraftSource`."""
