"""The constraint of one sequence: which tokens may follow the ones so far.

The state is a function of the rules and the tokens alone, so that any worker rebuilds it. Reasoning and text
before a tool call are free: such a state costs no mask. The grammar holds the rest.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from libs.structured.answer_closer import AnswerCloser
from libs.structured.grammar_cache import first_lines
from libs.structured.key_guard import KeyGuard
from libs.structured.stated_keys import stated_keys
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.special_tokens import THINK_END, TOOL_CALL_BEGIN, TOOL_CALLS_SECTION_BEGIN
from slipstream.sampling import OutputConstraint

# One row of a mask: bit t of the row allows token t.
MaskRows = npt.NDArray[np.int32]
# What a row may not sample; None: the row's mask says it.
Banned = tuple[int, ...] | None


class Phase(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"  # free until a tool call begins
    CONSTRAINED = "constrained"  # by the grammar
    ENDED = "ended"  # only tokens that end an answer


class GrammarConstraint:
    """Implements the engine's `TokenConstraint`. One thread at a time."""

    def __init__(
        self,
        rules: OutputConstraint,
        matcher: LLMatcher,
        vocabulary: GrammarVocabulary,
        *,
        closer: AnswerCloser | None = None,
        max_tokens: int = 0,
        filler: Any = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`closer`: ends the answer within `max_tokens`, as far as its grammar allows; None: it may be cut.

        `on_failure` is called when the matcher fails, of its grammar or of its limits.
        """
        self.filler = filler
        self._on_failure = on_failure
        self.matcher = matcher
        self.phase = _first_phase(rules)
        self.failure = ""
        self._rules = rules
        self._vocabulary = vocabulary
        n_distinct = stated_keys(rules.grammar)
        # What the grammar alone does not hold; most grammars need none.
        self.guard = KeyGuard(n_distinct, vocabulary.tokens) if n_distinct else None
        special = vocabulary.special_ids
        self._think_end = special[THINK_END]
        self._call_begins = (special[TOOL_CALLS_SECTION_BEGIN], special[TOOL_CALL_BEGIN])
        # Reasoning that an answer must follow ends with </think>, and by no other way.
        others = (*sorted(vocabulary.end_ids), *self._call_begins)
        self._banned_reasoning = () if rules.awaits_calls else others
        self._closer = closer
        self._end = closer.begin(matcher, max_tokens + len(rules.forced)) if closer is not None else None
        self.advance(rules.forced)

    @property
    def is_closing(self) -> bool:
        """Whether the answer ends as it does for its limit of tokens."""
        return self._end is not None and self._end.way is not None

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens of the answer. A token that the grammar forbids sets `failure`."""
        for token in tokens:
            self._consume(token)

    def count_allowed(self, drafts: Sequence[int]) -> int:
        """How many leading drafts the grammar allows. A token that ends the answer counts as forbidden."""
        ends = self._vocabulary.end_ids
        n = next((j for j, token in enumerate(drafts) if token in ends), len(drafts))
        if self.phase is Phase.CONSTRAINED:
            return self._count_constrained(drafts[:n])
        if self.phase is Phase.ENDED:
            return 0
        for j, token in enumerate(drafts[:n]):
            if token in self._banned():
                return j
            if self._next_phase(token) is Phase.CONSTRAINED:
                first = [token] if token in self._call_begins else []
                rest = [*first, *drafts[j + 1 : n]]
                return j + 1 - len(first) + self._count_constrained(rest, j + 1 - len(first))
        return n

    def needs_mask(self, drafts: Sequence[int]) -> bool:
        """Whether the grammar holds the next token or one after a draft; free text has no masks."""
        return self.phase is Phase.CONSTRAINED or any(
            token == self._think_end or token in self._call_begins for token in drafts
        )

    def fill(self, drafts: Sequence[int], masks: MaskRows) -> list[Banned]:
        """Write the masks of the next token and of the one after each draft; the state does not change."""
        phase, failure, n_taken = self.phase, self.failure, 0
        end = self._end
        place = self.guard.place if self.guard is not None else None
        banned: list[Banned] = [self._fill_row(masks[0])]
        for row, draft in enumerate(drafts, start=1):
            n_taken += self._consume(draft)
            banned.append(self._fill_row(masks[row]))
        if n_taken:
            self.matcher.rollback(n_taken)
        self.phase, self.failure = phase, failure or self.failure
        self._end = end
        if self.guard is not None and place is not None:
            self.guard.place = place
        return banned

    def note_failure(self) -> None:
        """Take over an error of the matcher, which stays in it."""
        if not self.failure and self.matcher.is_error():
            self.failure = first_lines(self.matcher.get_error())
            self._on_failure()

    def _fill_row(self, row: npt.NDArray[np.int32]) -> Banned:
        if self._end is not None and self._end.way is not None and self.phase is Phase.CONSTRAINED:
            _allow_only(row, self._end.way[:1] or self._vocabulary.end_ids)
            return None
        if self.phase is Phase.CONSTRAINED:
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self.note_failure()
            if self.guard is not None:
                self.guard.restrict(row)
            return None
        if self.phase is Phase.ENDED:
            _allow_only(row, self._vocabulary.end_ids)
            return None
        return self._banned()

    def _banned(self) -> tuple[int, ...]:
        return self._banned_reasoning if self.phase is Phase.REASONING else ()

    def _consume(self, token: int) -> int:
        """Take one token; returns 1 when the matcher has it too, else 0."""
        phase = self._next_phase(token)
        is_matched = phase is Phase.CONSTRAINED and (
            self.phase is Phase.CONSTRAINED or token in self._call_begins
        )
        self.phase = phase
        if token in self._call_begins:
            self._end = None  # a call that is cut must not look like a whole one
        elif self._end is not None:
            self._end = self._end._replace(n_left=self._end.n_left - 1)
        if is_matched and not self.failure:
            n_taken = int(self.matcher.consume_token(token))
            if n_taken and (self.guard is None or self.guard.consume(token)):
                if self._end is not None and self._closer is not None:
                    self._end = self._closer.after(self._end, token, self.matcher, self.guard)
                return n_taken
            self.note_failure()
            self.failure = self.failure or "a token that the grammar forbids"
            return n_taken
        return 0

    def _count_constrained(self, tokens: Sequence[int], n_before: int = 0) -> int:
        """How many leading tokens, which follow `n_before` others, the grammar and the end allow.

        The row after a token at which the closer looks belongs to the next step.
        """
        if self._end is not None and not (tokens and tokens[0] in self._call_begins):
            if self._end.way is not None:
                planned = zip(tokens, self._end.way, strict=False)
                return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], planned)))
            if self._closer is not None and not self._closer.is_slow:
                tokens = tokens[: max(0, self._end.n_left - n_before - self._end.look_at - 1)]
        n = self.matcher.validate_tokens(list(tokens)) if tokens else 0
        return n if self.guard is None else self.guard.count_allowed(tokens[:n])

    def _next_phase(self, token: int) -> Phase:
        if self.phase is Phase.ENDED or token in self._vocabulary.end_ids:
            return Phase.ENDED
        if self.phase is Phase.CONSTRAINED:
            return Phase.CONSTRAINED
        if self._rules.awaits_calls and token in self._call_begins:
            return Phase.CONSTRAINED
        if self.phase is Phase.REASONING and token == self._think_end:
            return Phase.TEXT if self._rules.awaits_calls else Phase.CONSTRAINED
        return self.phase


def _allow_only(row: npt.NDArray[np.int32], tokens: Iterable[int]) -> None:
    row[:] = 0
    for token in tokens:
        row.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


def _first_phase(rules: OutputConstraint) -> Phase:
    if rules.thinking:
        return Phase.REASONING
    return Phase.TEXT if rules.awaits_calls else Phase.CONSTRAINED
