"""Rules of a state machine over an engine whose pages a peer may read meanwhile."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from libs.engine.core.engine import PagedEngine


class PinningMachine(RuleBasedStateMachine):
    """Pins the first page of up to two sequences. Subclasses set `engine`, and unpin at their end."""

    engine: PagedEngine
    pins: list[tuple[int, ...]]

    @rule(index=st.integers(0, 20))
    def pin(self, index: int) -> None:
        sequences = [s for s in self.engine.sequences() if s.pages]
        if sequences and len(self.pins) < 2:
            pages = tuple(sequences[index % len(sequences)].pages[:1])
            self.engine.pin(pages)
            self.pins.append(pages)

    @rule()
    def unpin(self) -> None:
        if self.pins:
            self.engine.unpin(self.pins.pop())
