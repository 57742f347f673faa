"""The time of masks over a vocabulary of K2.5's size: a token, and a step of 1 and of 32 sequences."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from libs.engine.sampling.masked_logits import apply_masks
from libs.engine.step.constraint import StepMasks
from libs.structured.answer_grammar import OutputFormat, answer_grammar
from libs.structured.constraint import GrammarConstraint, Phase
from libs.structured.grammar_cache import compile_grammar
from libs.structured.mask_filler import GrammarMasks
from libs.structured.vocabulary import GrammarVocabulary
from slipstream.sampling import OutputConstraint

STEP_MS = 10.0
_TEXTS = {"type": "string", "maxLength": 400}
SCHEMAS: dict[str, dict[str, Any]] = {
    "tool call": {
        "type": "object",
        "properties": {
            "path": _TEXTS,
            "mode": {"enum": ["read", "write", "append"]},
            "lines": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 8},
            "content": _TEXTS,
        },
        "required": ["path", "mode", "content"],
        "additionalProperties": False,
    },
    "any JSON": {"type": "object"},
    "records": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "when": {"type": "string", "format": "date-time"},
                "price": {"type": "number", "minimum": 0},
                "tag": {"type": "string", "pattern": "^[a-z]{2,12}$"},
            },
            "required": ["id", "when", "price", "tag"],
        },
        "minItems": 2,
        "maxItems": 5,
    },
}


def measure_masks(vocabulary: GrammarVocabulary, *, tokens: int, threads: int) -> dict[str, Any]:
    """Milliseconds of compiling, CPU milliseconds of the mask of one token, and shares of a step."""
    compile_ms, mask_ms = [], []
    states: list[GrammarConstraint] = []
    filler = GrammarMasks(threads)
    for schema in SCHEMAS.values():
        grammar = answer_grammar(OutputFormat("json_schema", schema), (), {})
        began_s = time.perf_counter()
        matcher = compile_grammar(grammar, vocabulary)
        compile_ms.append((time.perf_counter() - began_s) * 1e3)
        for seed in range(12):
            state = GrammarConstraint(
                OutputConstraint(grammar), matcher.deep_copy(), vocabulary, filler=filler
            )
            mask_ms += _walk(state, vocabulary, np.random.default_rng(seed), tokens=tokens)
            states.append(state)
    ordered = sorted(mask_ms)
    return {
        "vocabulary": vocabulary.size,
        "compile_ms": {name: round(ms, 2) for name, ms in zip(SCHEMAS, compile_ms, strict=True)},
        "masks": len(ordered),
        "mask_ms_p50": round(statistics.median(ordered), 4),
        "mask_ms_p99": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
        "batches": {str(n): _batch(states[:n], filler, vocabulary) for n in (1, 32)},
    }


def _walk(
    state: GrammarConstraint, vocabulary: GrammarVocabulary, random: np.random.Generator, *, tokens: int
) -> list[float]:
    """The time of each mask along a random answer, which stops before its end."""
    row = np.zeros((1, -(-vocabulary.size // 32)), dtype=np.int32)
    times_ms: list[float] = []
    for _ in range(tokens):
        began_s = time.thread_time()
        state.fill((), row)
        times_ms.append((time.thread_time() - began_s) * 1e3)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        going_on = [
            int(token) for token in random.permutation(allowed)[:8] if token not in vocabulary.end_ids
        ]
        if state.phase is not Phase.CONSTRAINED or not going_on:
            break
        state.advance(going_on[:1])
    return times_ms


def _batch(
    states: list[GrammarConstraint], filler: GrammarMasks, vocabulary: GrammarVocabulary
) -> dict[str, float]:
    """The masks of one step of these sequences, computed together, and their way onto the logits."""
    masks = np.zeros((len(states), -(-vocabulary.size // 32)), dtype=np.int32)
    logits = torch.randn(len(states), vocabulary.size)
    fill_ms, fill_cpu_ms, apply_ms = [], [], []
    for _ in range(20):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        filler.fill([(state, ()) for state in states], masks)
        filled_s, filled_cpu_s = time.perf_counter(), time.thread_time()
        fill_cpu_ms.append((time.process_time() - began_cpu_s) * 1e3)
        apply_masks(logits, StepMasks(range(len(states)), masks, []))
        fill_ms.append((filled_s - began_s) * 1e3)
        apply_ms.append((time.thread_time() - filled_cpu_s) * 1e3)
    fill, put = statistics.median(fill_ms), statistics.median(apply_ms)
    return {
        "fill_ms": round(fill, 3),
        "fill_share_of_step": round(fill / STEP_MS, 4),
        "fill_cpu_ms": round(statistics.median(fill_cpu_ms), 3),
        "apply_on_cpu_ms": round(put, 3),
    }
