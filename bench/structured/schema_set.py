"""Which schemas of a folder are held, beside llguidance alone on the same files.

A file is one schema (JSONSchemaBench), or {"schema": .., "tests": [{"valid": .., "data": ..}]} (MaskBench).
A set is a folder, or the part of a file's name before `---` or before its number. llguidance alone takes the
schema as it is, with its default options. A file without JSON, and one that a busy machine had no time to
check, is named and does not count.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
from llguidance import LLMatcher

from libs.structured.answer_grammar import OutputFormat
from libs.structured.constraint import GrammarConstraint, Phase
from libs.structured.grammar_cache import compile_grammar
from libs.structured.grammar_check import CheckRequest
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from services.router.request.grammar_checker import GrammarChecker
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.sampling import OutputConstraint

SIDES = ("slipstream", "llguidance")


def measure_set(
    folder: Path, model_dir: Path, *, answers: int, max_tokens: int, check_limit_s: float
) -> dict[str, Any]:
    """The shares over all files of the folder by side, those of each set, and the files that differ."""
    tokenizer = Tokenizer.from_dir(model_dir)
    judge = _Judge(tokenizer, GrammarVocabulary.of(tokenizer), answers, max_tokens)
    checker = GrammarChecker(model_dir, limit_s=check_limit_s)
    sets: dict[str, dict[str, Counter[str]]] = {}
    differing: list[dict[str, Any]] = []
    unreadable: list[str] = []
    unchecked: list[str] = []
    try:
        for name, path, schema, tests in read_folder(folder, unreadable):
            try:
                ours = _ours(schema, checker, judge.vocabulary)
            except Unavailable:
                unchecked.append(path)
                continue
            starts = (ours, _theirs(schema, judge.vocabulary))
            counts = {
                side: judge.count(start, schema, tests) for side, start in zip(SIDES, starts, strict=True)
            }
            of_set = sets.setdefault(name, {side: Counter() for side in SIDES})
            for side in SIDES:
                of_set[side].update(counts[side])
            if counts[SIDES[0]] != counts[SIDES[1]]:
                differing.append({"file": path, **{side: dict(counts[side]) for side in SIDES}})
    finally:
        checker.close()
    total = {side: sum((of_set[side] for of_set in sets.values()), Counter[str]()) for side in SIDES}
    return {
        **{side: _shares(count) for side, count in total.items()},
        "sets": {name: {side: _shares(of_set[side]) for side in SIDES} for name, of_set in sets.items()},
        "differing": differing,
        "unreadable": unreadable,
        "unchecked": unchecked,
    }


def read_folder(
    folder: Path, unreadable: list[str]
) -> Iterator[tuple[str, str, Any, list[Mapping[str, Any]]]]:
    """Set, path, schema and tests of each file; the paths of files without JSON go to `unreadable`."""
    for path in sorted(folder.rglob("*.json")):
        where = str(path.relative_to(folder))
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            unreadable.append(where)
            continue
        in_name = re.match(r"(.+?)(---|_\d+\.json$)", path.name)
        name = in_name[1] if in_name else path.parent.name
        if isinstance(content, dict) and "schema" in content and isinstance(content.get("tests"), list):
            yield name, where, content["schema"], content["tests"]
        else:
            yield name, where, content, []


class _Start(NamedTuple):
    """A grammar in its first state."""

    grammar: str
    matcher: LLMatcher

    def state(self, vocabulary: GrammarVocabulary) -> GrammarConstraint:
        return GrammarConstraint(OutputConstraint(self.grammar), self.matcher.deep_copy(), vocabulary)


def _ours(schema: Any, checker: GrammarChecker, vocabulary: GrammarVocabulary) -> _Start | None:
    """None for a schema that is refused; the router takes no other JSON than objects and booleans.

    Raises Unavailable where the machine is too busy.
    """
    if not isinstance(schema, (Mapping, bool)):
        return None
    part = OutputFormat("json_schema", schema)
    try:
        grammar = checker.check(CheckRequest(part))
        return _Start(grammar, compile_grammar(grammar, vocabulary))
    except InvalidArgument:
        return None


def _theirs(schema: Any, vocabulary: GrammarVocabulary) -> _Start | None:
    matcher = LLMatcher(vocabulary.trie, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    return None if matcher.is_error() else _Start("", matcher)


class _Judge:
    """Counts what a matcher accepts, and which of its answers are valid."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: GrammarVocabulary, answers: int, max_tokens: int
    ) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._answers = answers
        self._max_tokens = max_tokens
        closing = [
            token
            for token in range(tokenizer.base_vocab_tokens)
            if tokenizer.token_bytes(token)[:1] in (b'"', b"]", b"}")
        ]
        self._closing = np.zeros(vocabulary.size, dtype=np.bool_)
        self._closing[[*closing, *vocabulary.end_ids]] = True

    def count(self, start: _Start | None, schema: Any, tests: list[Mapping[str, Any]]) -> Counter[str]:
        """The counts of one schema; no start: it does not compile."""
        count = Counter(schemas=1)
        if start is not None:
            count["compiled"] = 1
            self._judge_instances(count, start, tests)
            self._judge_answers(count, start, schema)
        return count

    def _judge_instances(self, count: Counter[str], start: _Start, tests: list[Mapping[str, Any]]) -> None:
        for test in tests:
            state = start.state(self.vocabulary)
            state.advance(self._tokenizer.encode_text(json.dumps(test["data"], ensure_ascii=False)))
            accepted = not state.failure and state.matcher.is_accepting()
            kind = "valid" if test["valid"] else "invalid"
            count[f"{kind}_instances"] += 1
            count[f"{kind}_right"] += accepted == test["valid"]

    def _judge_answers(self, count: Counter[str], start: _Start, schema: Any) -> None:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        judge = kind(schema, format_checker=kind.FORMAT_CHECKER)
        for seed in range(self._answers):
            text = self._random_answer(start, seed)
            if text is None:
                continue
            count["answers"] += 1
            try:
                count["valid_answers"] += judge.is_valid(json.loads(text))
            except Exception:
                count["not_judged"] += 1

    def _random_answer(self, start: _Start, seed: int) -> str | None:
        """An answer of a model with equal logits, in growing haste; None without an end in `max_tokens`."""
        state = start.state(self.vocabulary)
        random = np.random.default_rng(seed)
        row = np.zeros((1, -(-self.vocabulary.size // 32)), dtype=np.int32)
        tokens: list[int] = []
        for n in range(self._max_tokens):
            state.fill((), row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: self.vocabulary.size]
            allowed = np.flatnonzero(bits)
            if state.failure or not len(allowed):
                return None
            closing = allowed[self._closing[allowed]]
            if len(closing) and random.random() < 0.1 + 2 * n / self._max_tokens:
                allowed = closing
            token = int(allowed[random.integers(len(allowed))])
            state.advance((token,))
            if state.phase is Phase.ENDED:
                return self._tokenizer.decode_bytes(tokens).decode()
            tokens.append(token)
        return None


def _shares(count: Counter[str]) -> dict[str, Any]:
    def share(part: str, whole: str, *, less: str = "") -> float | None:
        n = count[whole] - count[less]
        return round(count[part] / n, 4) if n else None

    return {
        "schemas": count["schemas"],
        "compiled": share("compiled", "schemas"),
        "answers": count["answers"],
        "valid_answers": share("valid_answers", "answers", less="not_judged"),
        "not_judged": count["not_judged"],
        "valid_instances": count["valid_instances"],
        "invalid_instances": count["invalid_instances"],
        "valid_accepted": share("valid_right", "valid_instances"),
        "invalid_refused": share("invalid_right", "invalid_instances"),
    }
