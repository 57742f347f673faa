"""Masks of a step: on their own thread where they take time, and at once for free text."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import numpy as np
import pytest

from libs.engine.sampling import token_masks
from libs.engine.sampling.token_masks import MaskThread, compute_masks
from libs.engine.step.step_model import SequenceRows
from libs.structured.answer_grammar import answer_grammar
from libs.structured.constraints import ConstraintFactory
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.special_tokens import TOOL_CALL_BEGIN
from libs.text.tokenizer import Tokenizer
from slipstream.sampling import OutputConstraint, SamplingParams

TOKENIZER = Tokenizer.from_dir(Path(__file__).parents[3] / "models" / "slipstream-mini")
CALLS = answer_grammar(None, [CallableTool("f")], TOKENIZER.special_ids)
BEGIN = TOKENIZER.special_id(TOOL_CALL_BEGIN)
WORD = TOKENIZER.encode_text("word")[0]


@functools.cache
def factory() -> ConstraintFactory:
    return ConstraintFactory(lambda: GrammarVocabulary.of(TOKENIZER), n_threads=1)


def rows(emitted: list[int], drafts: list[int], *, thinking: bool = False) -> SequenceRows:
    """A sequence that awaits calls, in the state after these tokens."""
    rules = OutputConstraint(CALLS, awaits_calls=True, thinking=thinking)
    return SequenceRows(
        seq_id="a",
        tokens=np.array([WORD, *emitted, *drafts], dtype=np.uint32),
        pages=(),
        n_rows=1 + len(drafts),
        n_sampled=1 + len(drafts),
        n_prompt=1,
        first_index=len(emitted),
        params=SamplingParams(),
        output_counts={},
        prompt_ids=None,
        constraint=factory().make(rules, emitted),
    )


@pytest.mark.parametrize(
    ("emitted", "drafts", "thinking", "is_held"),
    [
        ([], [], False, False),
        ([WORD], [WORD, WORD], False, False),
        ([], [WORD], True, False),
        ([], [WORD, BEGIN], False, True),
        ([BEGIN], [], False, True),
    ],
)
def test_only_masks_that_take_time_go_to_the_thread(
    emitted: list[int], drafts: list[int], thinking: bool, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = rows(emitted, drafts, thinking=thinking)
    threads = []

    def computed(*work: object) -> object:
        threads.append(threading.current_thread())
        return compute_masks(*work)  # type: ignore[arg-type]

    monkeypatch.setattr(token_masks, "compute_masks", computed)
    masks = MaskThread().begin([sequence], TOKENIZER.vocab_size)()
    assert masks is not None
    assert (threads != [threading.current_thread()]) == is_held
    expected = compute_masks([sequence], TOKENIZER.vocab_size)
    assert expected is not None
    assert (masks.masked, masks.banned) == (expected.masked, expected.banned)
    assert np.array_equal(masks.masks, expected.masks)
