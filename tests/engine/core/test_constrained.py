"""Sequences with a grammar: drafts change no token, and a replayed prefix gives the same state."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits

from libs.engine.core.engine import PagedEngine
from libs.engine.core.fake import build_fake_engine
from libs.engine.step.types import SequenceSpec, StepOutput
from libs.structured import grammar_cache
from libs.structured.answer_grammar import OutputFormat, answer_grammar
from libs.structured.constraints import ConstraintFactory
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from slipstream.errors import InvalidArgument
from slipstream.sampling import OutputConstraint
from tests.engine.support import Draft, Transcript, drive, make_spec, no_drafts

TOKENIZER = Tokenizer.from_dir(Path(__file__).parents[3] / "models" / "slipstream-mini")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMAR = answer_grammar(OutputFormat("json_schema", SCHEMA), (), {})
CALLS = answer_grammar(None, [CallableTool("f", SCHEMA), CallableTool("g")], TOKENIZER.special_ids)
STOPS = tuple(sorted(TOKENIZER.special_id(name) for name in ("<|im_end|>", "[EOS]", "[EOT]")))
RULES = {
    "whole answer": OutputConstraint(GRAMMAR),
    "after reasoning": OutputConstraint(GRAMMAR, thinking=True),
    "calls": OutputConstraint(CALLS, awaits_calls=True),
}


CHOICES = answer_grammar(OutputFormat("choice", ["Every item", "Every item has a card", "No"]), (), {})
FORMS = {"choice": OutputConstraint(CHOICES), "object": OutputConstraint(GRAMMAR)}


@functools.cache
def factory() -> ConstraintFactory:
    return ConstraintFactory(lambda: GrammarVocabulary.of(TOKENIZER), n_threads=2)


def make_engine() -> PagedEngine:
    return build_fake_engine(vocab_size=TOKENIZER.vocab_size, n_pages=64, block_tokens=16)


def run(rules: OutputConstraint, draft: Draft = no_drafts, **params: object) -> list[int]:
    spec = make_spec("a", range(1, 20), **{"max_tokens": 200, "stop_token_ids": STOPS, **params})
    return run_spec(rules, spec, draft).tokens["a"]


def run_spec(
    rules: OutputConstraint, spec: SequenceSpec, draft: Draft = no_drafts, *, ends: bool = False
) -> Transcript:
    """`ends`: the answer ends within its limit."""
    engine = make_engine()
    engine.reserve(spec)
    limit = spec.sampling.max_tokens if ends else 0
    engine.start("a", constraint=factory().make(rules, spec.emitted, max_tokens=limit))
    return drive(engine, draft)


def drafts_of(answer: Sequence[int], rng: np.random.Generator) -> Draft:
    """Drafts of the answer with wrong tokens among them."""
    n_output = 0

    def draft(outputs: Sequence[StepOutput]) -> Mapping[str, Sequence[int]]:
        nonlocal n_output
        n_output += sum(len(output.tokens) for output in outputs)
        drafts = list(answer[n_output : n_output + int(rng.integers(0, 6))])
        for j in range(len(drafts)):
            if rng.random() < 0.2:
                drafts[j] = int(rng.integers(0, TOKENIZER.vocab_size))
        return {"a": drafts} if n_output else {}

    return draft


@pytest.mark.parametrize("kind", RULES)
def test_drafts_change_no_token(kind: str) -> None:
    for seed in range(6):
        plain = run(RULES[kind], temperature=1.0, seed=seed)
        for draft_seed in range(3):
            drafts = drafts_of(plain, np.random.default_rng(draft_seed))
            assert run(RULES[kind], drafts, temperature=1.0, seed=seed) == plain


def test_forbidden_drafts_are_cut_before_they_are_verified() -> None:
    proposed: list[StepOutput] = []

    def draft(outputs: Sequence[StepOutput]) -> Mapping[str, Sequence[int]]:
        proposed.extend(outputs)
        return {"a": [STOPS[0]] * 4}

    run(RULES["whole answer"], draft)
    assert len(proposed) > 5
    assert not any(output.proposed_drafts for output in proposed)


def test_an_answer_ends_where_the_grammar_does() -> None:
    for seed in range(8):
        tokens = run(RULES["whole answer"], temperature=1.0, seed=seed)
        assert tokens[-1] in STOPS
        answer = json.loads(TOKENIZER.decode_bytes(tokens[:-1]))
        assert set(answer) == {"name", "n"}


def test_ignore_eos_adds_nothing_to_the_text() -> None:
    tokens = run(RULES["whole answer"], ignore_eos=True, max_tokens=300)
    assert len(tokens) == 300
    json.loads(TOKENIZER.decode_bytes(tokens))
    end = next(i for i, token in enumerate(tokens) if token in STOPS)
    assert set(tokens[end:]) <= set(STOPS)


def test_a_constraint_rebuilt_from_emitted_tokens_continues_the_same() -> None:
    for kind, rules in RULES.items():
        whole = run(rules, temperature=1.0, seed=3)
        for n in (1, len(whole) // 3, len(whole) - 1):
            engine = make_engine()
            spec = make_spec("a", range(1, 20), max_tokens=200, stop_token_ids=STOPS, temperature=1.0, seed=3)
            spec = replace(spec, emitted=tuple(whole[:n]))
            engine.reserve(spec)
            engine.start("a", constraint=factory().make(rules, spec.emitted))
            assert drive(engine).tokens["a"] == whole[n:], kind


def test_no_call_of_an_undeclared_function_without_a_section() -> None:
    section = TOKENIZER.special_id("<|tool_calls_section_begin|>")
    call, arguments = (
        TOKENIZER.special_id("<|tool_call_begin|>"),
        TOKENIZER.special_id("<|tool_call_argument_begin|>"),
    )
    n_calls = 0
    for seed in range(12):
        # The first token begins the calls, as a draft could not force it.
        engine = make_engine()
        spec: SequenceSpec = make_spec(
            "a", range(1, 20), max_tokens=150, stop_token_ids=STOPS, temperature=1.0, seed=seed
        )
        spec = replace(spec, emitted=(section,))
        engine.reserve(spec)
        engine.start("a", constraint=factory().make(RULES["calls"], spec.emitted))
        tokens = drive(engine).tokens["a"]
        for begin in [i for i, token in enumerate(tokens) if token == call]:
            if arguments not in tokens[begin:]:
                continue
            header = TOKENIZER.decode(tokens[begin + 1 : tokens.index(arguments, begin)])
            assert header.split(":")[0] in ("functions.f", "functions.g")
            n_calls += 1
    assert n_calls >= 12


def test_a_grammar_with_too_costly_masks_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    costly = answer_grammar(
        OutputFormat("lark", 'start: e{60,200} "!"\ne: "a"+ b*\nb: "b" | "a" | e'), (), {}
    )
    constraints = {"plain": factory().make(OutputConstraint(GRAMMAR), ())}
    monkeypatch.setattr(
        grammar_cache, "CLIENT_LIMITS", LLParserLimits(step_max_items=100, verbose_errors=False)
    )
    constraints["costly"] = factory().make(OutputConstraint(costly, field="guided_grammar"), ())
    engine = make_engine()
    for name, constraint in constraints.items():
        engine.reserve(make_spec(name, range(1, 20), max_tokens=200, stop_token_ids=STOPS))
        engine.start(name, constraint=constraint)
    driven = drive(engine)
    failure = driven.last["costly"].failure
    assert isinstance(failure, InvalidArgument)
    assert failure.field == "guided_grammar" and "Too many items" in failure.reason
    assert driven.last["plain"].failure is None
    assert driven.tokens["plain"] == run(OutputConstraint(GRAMMAR))


def test_a_grammar_that_does_not_compile_names_the_clients_field() -> None:
    with pytest.raises(InvalidArgument) as raised:
        factory().make(OutputConstraint('{"grammars": []}', field="guided_regex"), ())
    assert raised.value.field == "guided_regex"


@pytest.mark.parametrize("kind", FORMS)
def test_drafts_and_a_resumption_change_no_answer_near_its_limit(kind: str) -> None:
    """An answer that closes for its limit says `length`, and one that the model ends says `stop`."""
    finishes = set()
    for max_tokens in range(2, 14) if kind == "choice" else (*range(17, 35, 3), 120, 122):
        spec = make_spec(
            "a",
            range(1, 20),
            max_tokens=max_tokens,
            stop_token_ids=STOPS,
            temperature=1.0,
            seed=max_tokens % 7,
            logprobs=0,
        )
        plain = run_spec(FORMS[kind], spec, ends=True)
        tokens = plain.tokens["a"]
        finishes.add(plain.last["a"].finish)
        drafts = drafts_of(tokens, np.random.default_rng(max_tokens))
        drafted = run_spec(FORMS[kind], spec, drafts, ends=True)
        assert drafted.tokens["a"] == tokens
        assert drafted.last["a"].finish == plain.last["a"].finish
        n = len(tokens) // 2
        rules = replace(FORMS[kind], is_closing=any(o.is_closing for o in plain.outputs[:n]))
        resumed = run_spec(rules, replace(spec, emitted=tuple(tokens[:n])), ends=True)
        assert resumed.tokens["a"] == tokens[n:]
        assert resumed.last["a"].finish == plain.last["a"].finish
    assert finishes == {"stop", "length"}
