"""Command line of the workers that run a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from libs.common.runtime.process_options import process_parser
from libs.engine.step.types import Engine
from libs.worker.restore.restore_budget import FLOOR_MS


def worker_parser(role: str, description: str) -> argparse.ArgumentParser:
    """The options every worker of this kind takes."""
    parser = process_parser(role, description)
    parser.add_argument(
        "--advertise", default="", help="HOST:PORT that peers dial; default: what --listen came to"
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory")
    parser.add_argument("--draft-model", type=Path, help="EAGLE-3 head directory; none = no draft features")
    parser.add_argument(
        "--engine",
        choices=("torch", "fake"),
        default="torch",
        help="fake: deterministic, without torch, for tests",
    )
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options of workers that own KV pages."""
    parser.add_argument("--kv-memory-bytes", type=int, help="size of the KV cache; default: by the model")
    parser.add_argument(
        "--block-tokens", type=int, default=64, help="tokens of a KV block, the same in the cluster"
    )
    parser.add_argument("--max-batch", type=int, default=64, help="sequences in one engine step")
    parser.add_argument(
        "--step-tokens", type=int, default=512, help="rows of one step, prefill chunks included"
    )
    parser.add_argument(
        "--restore-floor-ms",
        type=float,
        default=FLOOR_MS,
        help="how long any prompt may wait for KV of others, however quick it is to compute",
    )
    parser.add_argument("--max-waiting", type=int, default=256, help="sequences that may wait for KV pages")
    parser.add_argument(
        "--threads", type=int, help="CPU threads of the engine; default: as OMP_NUM_THREADS says"
    )
    parser.add_argument(
        "--fake-pace-s", type=float, default=0.0, help="with --engine fake: seconds each token takes"
    )


def engine_builder(options: argparse.Namespace) -> Callable[[], Engine]:
    """What builds the engine, on the thread that will own it. Torch is imported there, or not at all."""
    if options.engine == "fake":
        return lambda: _fake(options)
    if options.model is None:
        raise SystemExit("--model is required")
    return lambda: _torch(options)


def _torch(options: argparse.Namespace) -> Engine:
    from libs.engine.core.build import EngineOptions, build_engine

    return build_engine(
        options.model,
        EngineOptions(
            kv_memory_bytes=options.kv_memory_bytes,
            block_tokens=options.block_tokens,
            draft_model_dir=options.draft_model,
            max_batch=options.max_batch,
            step_tokens=options.step_tokens,
            threads=options.threads,
        ),
    )


def _fake(options: argparse.Namespace) -> Engine:
    import json
    import time

    from libs.engine.core.fake import build_fake_engine

    # With the vocabulary of the model it stands in for, the router's requests fit it.
    vocab = {}
    if options.model is not None:
        vocab = {"vocab_size": json.loads((options.model / "config.json").read_text())["vocab_size"]}
    row_bytes = 64
    page_bytes = options.block_tokens * row_bytes
    return build_fake_engine(
        n_pages=max((options.kv_memory_bytes or 1 << 20) // page_bytes, 1),
        block_tokens=options.block_tokens,
        row_bytes=row_bytes,
        max_batch=options.max_batch,
        step_tokens=options.step_tokens,
        pace_s_per_token=options.fake_pace_s,
        sleep=time.sleep,
        **vocab,
    )
