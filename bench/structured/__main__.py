"""What structured output costs a step, and which schemas of a folder it holds.

    python -m bench.structured [--json] [--vocabulary 163584] [--tokens 200] [--dialogues 20]
    python -m bench.structured --schemas DIR [--answers 2] [--json]

Masks are measured over a vocabulary of K2.5's size, one at a time and 32 together; workers compute them while
the model computes. Tokens a second and acceptance length are those of the shipped model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.structured.engine_speed import measure_engine
from bench.structured.large_vocabulary import BASE_TOKENS, large_tokenizer
from bench.structured.mask_cost import measure_masks
from bench.structured.schema_set import measure_set
from libs.structured.vocabulary import GrammarVocabulary
from models.settings import BASE_DIR


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("structured", __doc__)
    parser.add_argument("--vocabulary", type=int, default=BASE_TOKENS, help="tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of a random answer (default: %(default)s)")
    parser.add_argument("--dialogues", type=int, default=20, help="held-out ones (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--schemas", type=Path, help="folder of schemas, with or without instances")
    parser.add_argument("--answers", type=int, default=2, help="a schema (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=600, help="of an answer (default: %(default)s)")
    parser.add_argument(
        "--check-limit-s", type=float, default=30.0, help="of a schema (default: %(default)s)"
    )
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    if options.schemas is not None:
        return measure_set(
            options.schemas,
            BASE_DIR,
            answers=options.answers,
            max_tokens=options.max_tokens,
            check_limit_s=options.check_limit_s,
        )
    tokenizer = large_tokenizer(options.vocabulary)
    began_s = time.perf_counter()
    vocabulary = GrammarVocabulary.of(tokenizer)
    built_s = time.perf_counter() - began_s
    return {
        "vocabulary_s": round(built_s, 2),
        **measure_masks(vocabulary, tokens=options.tokens, threads=options.threads),
        "engine": measure_engine(dialogues=options.dialogues, threads=options.threads),
    }


def main() -> None:
    """Entry point."""
    options = parse_options()
    report = run(options)
    sys.stdout.write(json.dumps(report, indent=None if options.json else 2) + "\n")


if __name__ == "__main__":
    main()
