"""Command line of the workers that run a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from libs.common.transport.open import TRANSPORT_HELP, transport_text
from libs.engine.types import Engine
from libs.worker.restore_budget import FLOOR_MS

DEFAULT_DRAIN_S = 5.0


def worker_parser(role: str, description: str) -> argparse.ArgumentParser:
    """The options every worker of this kind takes."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=description)
    parser.add_argument(
        "--instance", required=True, help="name of this process in the cluster, unique in its role"
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:0", help="address of the gRPC server; port 0 = any free one"
    )
    parser.add_argument(
        "--advertise", default="", help="HOST:PORT that peers dial; default: what --listen came to"
    )
    parser.add_argument(
        "--etcd", default="", help="HOST:PORT[,HOST:PORT..] of etcd; empty = do without discovery"
    )
    parser.add_argument("--run-dir", type=Path, default=Path(".run"), help="directory for files of this run")
    parser.add_argument("--region", default="", help="where it stands: KV moves within a region only")
    parser.add_argument("--model", type=Path, help="checkpoint directory")
    parser.add_argument("--draft-model", type=Path, help="EAGLE-3 head directory; none = no draft features")
    parser.add_argument("--transport", type=transport_text, default="auto", help=TRANSPORT_HELP)
    parser.add_argument(
        "--engine",
        choices=("torch", "fake"),
        default="torch",
        help="fake: deterministic, without torch, for tests",
    )
    parser.add_argument("--tls-ca", type=Path, help="PEM; with the two below: mTLS on gRPC, both ways")
    parser.add_argument("--tls-certificate", type=Path, help="PEM")
    parser.add_argument("--tls-key", type=Path, help="PEM")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    parser.add_argument(
        "--drain-s", type=float, default=DEFAULT_DRAIN_S, help="how long SIGTERM waits for what runs, seconds"
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
    from libs.engine.build import EngineOptions, build_engine

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

    from libs.engine.fake import build_fake_engine

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
