"""Drafts of an EAGLE-3 head in one call of the compiled kernels, beside those of single operations.

    python -m bench.draft_chain [--head DIR --model DIR] [--contexts 1,4,16] [--drafts 7] [--threads 2]

Both ways draft in turn from the same contexts of random rows. Printed are the medians of microseconds a draft
of all contexts, the ratio of the one call to single operations, and the share of tokens that are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.command_line import bench_parser
from bench.medians import print_medians
from libs.engine.eagle.context import DraftContext
from libs.engine.eagle.head import EagleHead
from libs.engine.kernels.library import load_library
from libs.engine.kernels.native import NativeKernels

_MODELS = Path(__file__).parents[1] / "models"
_WINDOW_TOKENS = 512


def random_contexts(head: EagleHead, n_contexts: int, n_rows: int) -> list[DraftContext]:
    """Contexts of one length."""
    generator = torch.Generator().manual_seed(1)
    contexts = []
    for _ in range(n_contexts):
        features = torch.randn(n_rows, head.config.hidden_size, generator=generator)
        tokens = torch.randint(0, head.config.vocab_size, (n_rows,), generator=generator)
        inputs, rows = head.project(features, tokens, torch.arange(n_rows))
        context = DraftContext(head.config.kv_shape, _WINDOW_TOKENS, rows.keys)
        context.append(0, rows.keys, rows.values)
        context.newest = inputs.row(n_rows - 1)
        contexts.append(context)
    return contexts


@torch.inference_mode()
def measure(head: EagleHead, n_contexts: int, n_rows: int, n_drafts: int, rounds: int) -> dict[str, float]:
    """Medians of both ways."""
    contexts = random_contexts(head, n_contexts, n_rows)
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "one_call": lambda: head.draft(contexts, n_drafts, 0.0),
        "operations": lambda: head.draft_by_steps(contexts, n_drafts, 0.0),
    }
    taken_us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, draft in ways.items():
            began_s = time.perf_counter()
            draft()
            taken_us[name].append((time.perf_counter() - began_s) * 1e6 / n_drafts)
    one_us, many_us = (statistics.median(taken_us[name]) for name in ways)
    first, second = (np.array(draft()) for draft in ways.values())
    return {
        "one_call_us": round(one_us, 1),
        "operations_us": round(many_us, 1),
        "ratio": round(one_us / many_us, 3),
        "equal_tokens": round(float((first == second).mean()), 3),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser("draft_chain", __doc__)
    parser.add_argument("--head", type=Path, default=_MODELS / "slipstream-mini-eagle3")
    parser.add_argument("--model", type=Path, default=_MODELS / "slipstream-mini", help="the head's target")
    parser.add_argument("--contexts", default="1,4,16", help="numbers of sequences, by comma")
    parser.add_argument("--rows", type=int, default=200, help="of each context")
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of sequences."""
    options = _options(arguments)
    torch.set_num_threads(1)  # as in a decode worker
    kernels = NativeKernels(load_library(), options.threads)
    head = EagleHead.load(options.head, options.model, kernels)
    found = {
        n: measure(head, int(n), options.rows, options.drafts, options.rounds)
        for n in options.contexts.split(",")
    }
    print_medians(found, as_json=options.json)


if __name__ == "__main__":
    main()
