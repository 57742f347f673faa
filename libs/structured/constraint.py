"""The constraint of one sequence: which tokens may follow the ones so far.

The state is a function of the rules and the tokens alone, so that any worker rebuilds it. Reasoning and text
before a tool call are free: such a state costs no mask. The grammar holds the rest.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from libs.structured.answer_closer import AnswerCloser, AnswerEnd, unplanned
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

        A tool call may be cut in any case: half a command must not look like a whole one. `on_failure` is
        called when the matcher fails, of its grammar or of its limits.
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
        self.is_closing = rules.is_closing  # a token of the model has been replaced for the limit of tokens
        self.field = rules.field
        self._closer = None if rules.awaits_calls else closer
        self._end = self._begun(max_tokens + len(rules.forced))
        self._foreseen: list[tuple[int, AnswerEnd]] = []  # the next tokens, each with the end after it
        self._n_taken, self._replaced_at = 0, -1
        self._look_s = 0.0
        self.advance(rules.forced)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens of the answer. A token that the grammar forbids sets `failure`."""
        for token in tokens:
            before = self.phase
            self._consume(token)
            self._end = self._end_after(token, before)
            self.is_closing |= self._n_taken == self._replaced_at
            self._n_taken += 1

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
                if self._end is not None:  # the end is planned with the first token of the form
                    return j
                first = [token] if token in self._call_begins else []
                return j + 1 - len(first) + self._count_constrained([*first, *drafts[j + 1 : n]])
        return n

    def settle(self, drafts: Sequence[int], token: int) -> Collection[int]:
        """What may come after `drafts` in place of a token of the model; empty: that token may.

        It may not where the answer could not end within its limit after it. The drafts are some that
        `count_allowed` counted.
        """
        if not self._has_way() or token in self._vocabulary.end_ids or token in self._call_begins:
            return ()
        foreseen = self._foresee([*drafts, token])
        if len(foreseen) != len(drafts):
            return ()
        end = foreseen[-1][1] if foreseen else self._end
        if end is None or end.way is None:
            return ()
        others = end.way.tokens[:1]
        assert self._closer is not None
        if not (others and self._closer.keeps_text(others[0], token, self.matcher, drafts)):
            self._replaced_at = self._n_taken + len(drafts)
        return others or self._vocabulary.end_ids

    def needs_mask(self, drafts: Sequence[int]) -> bool:
        """Whether the grammar holds the next token or one after a draft; free text has no masks."""
        return self.phase is Phase.CONSTRAINED or any(
            token == self._think_end or token in self._call_begins for token in drafts
        )

    def fill(self, drafts: Sequence[int], masks: MaskRows) -> list[Banned]:
        """Write the masks of the next token and of the one after each draft; the state does not change."""
        phase, failure, n_taken = self.phase, self.failure, 0
        place = self.guard.place if self.guard is not None else None
        banned: list[Banned] = [self._fill_row(masks[0])]
        for row, draft in enumerate(drafts, start=1):
            n_taken += self._consume(draft)
            banned.append(self._fill_row(masks[row]))
        if n_taken:
            self.matcher.rollback(n_taken)
        self.phase, self.failure = phase, failure or self.failure
        if self.guard is not None and place is not None:
            self.guard.place = place
        return banned

    def note_failure(self) -> None:
        """Take over an error of the matcher, which stays in it."""
        if not self.failure and self.matcher.is_error():
            self.failure = first_lines(self.matcher.get_error())
            self._on_failure()

    def _fill_row(self, row: npt.NDArray[np.int32]) -> Banned:
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
        if is_matched and not self.failure:
            n_taken = int(self.matcher.consume_token(token))
            if n_taken and (self.guard is None or self.guard.consume(token)):
                return n_taken
            self.note_failure()
            self.failure = self.failure or "a token that the grammar forbids"
            return n_taken
        return 0

    def _begun(self, n_left: int) -> AnswerEnd | None:
        """The end of an answer with these tokens left; reasoning has no form yet."""
        if self._closer is None or self.phase is not Phase.CONSTRAINED:
            return None if self._closer is None else AnswerEnd(n_left)
        return self._closer.begin(self.matcher, self.guard, n_left)

    def _end_after(self, token: int, before: Phase) -> AnswerEnd | None:
        """The end after a token that has just been taken, in the phase `before`."""
        foreseen = self._foreseen.pop(0) if self._foreseen else None
        if foreseen is not None and foreseen[0] == token:
            return foreseen[1]
        self._foreseen.clear()
        end = self._end
        if end is None or self._closer is None or token in self._call_begins:
            return None
        if self.phase is not Phase.CONSTRAINED or self.failure:
            return end._replace(n_left=end.n_left - 1, way=None)
        if before is not Phase.CONSTRAINED:
            return self._begun(end.n_left - 1)
        return self._after(end, token) or unplanned(end.n_left - 1)

    def _after(self, end: AnswerEnd, token: int) -> AnswerEnd | None:
        """See `AnswerCloser.after`."""
        assert self._closer is not None
        began_s = time.thread_time()
        try:
            return self._closer.after(end, token, self.matcher, self.guard)
        finally:
            self._look_s += time.thread_time() - began_s

    def take_look_s(self) -> float:
        """The CPU time of looks for the end since the last call."""
        look_s, self._look_s = self._look_s, 0.0
        return look_s

    def stop_looking(self) -> None:
        """Look for the end no more, nor in other answers of the grammar: they may be cut at their limit."""
        if self._closer is not None:
            self._closer.is_slow = True

    def _count_constrained(self, tokens: Sequence[int]) -> int:
        """How many leading tokens the grammar and the end allow."""
        n = self.matcher.validate_tokens(list(tokens)) if tokens else 0
        if self.guard is not None:
            n = self.guard.count_allowed(tokens[:n])
        if self._end is None or not n or tokens[0] in self._call_begins:
            return n
        if self._has_way():
            return len(self._foresee(tokens[:n]))
        # The row after a token at which the closer looks belongs to the next step.
        return min(n, max(0, self._end.n_left - self._end.look_at - 1))

    def _has_way(self) -> bool:
        return self._end is not None and self._end.way is not None and not self.failure

    def _foresee(self, tokens: Sequence[int]) -> list[tuple[int, AnswerEnd]]:
        """The leading tokens after which the answer still has a way to its end, each with that end.

        The last of them may have an end that is far. The state does not change.
        """
        end, known = self._end, self._foreseen
        place = self.guard.place if self.guard is not None else None
        self._foreseen, n_taken = [], 0
        for at, token in enumerate(tokens):
            if end is None or end.way is None or token in self._call_begins:
                break
            if not self.matcher.consume_token(token):
                break
            n_taken += 1
            if self.guard is not None and not self.guard.consume(token):
                break
            is_known = known[at : at + 1] and known[at][0] == token
            end = known[at][1] if is_known else self._after(end, token)
            known = known if is_known else []
            if end is None:
                break
            self._foreseen.append((token, end))
        if n_taken:
            self.matcher.rollback(n_taken)
        if self.guard is not None and place is not None:
            self.guard.place = place
        return self._foreseen

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
