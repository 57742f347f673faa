"""Logits in bf16 against fp64, beside transformers' own bf16 on the same checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.gpu.case import Bench, Figure, ReportCase
from bench.gpu.cases.installed import check_installed
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.batch import ForwardBatch
from tests.support.random_checkpoint import (
    BENCH_CONFIG,
    TINY_CONFIG,
    RandomCheckpoint,
    write_random_checkpoint,
)

_BLOCK_TOKENS = 64


def accuracy_cases(bench: Bench) -> Iterator[ReportCase]:
    config, n_rows = (
        (TINY_CONFIG | {"num_hidden_layers": 2}, 6) if bench.is_miniature else (BENCH_CONFIG, 900)
    )
    spec = RandomCheckpoint(dict(config), quantization="int4")
    yield ReportCase("logits", f"{n_rows} rows, against fp64", partial(_measure, bench, spec, n_rows))


def _measure(bench: Bench, spec: RandomCheckpoint, n_rows: int) -> Figure:
    version = check_installed("transformers", "pip install transformers")
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config = write_random_checkpoint(Path(folder), spec)
        tokens = np.random.default_rng(1).integers(0, config.vocab_size, n_rows).astype(np.int32)
        exact = _peer_logits(Path(folder), torch.float64, tokens, bench.device)
        ours = _own_logits(Path(folder), tokens, bench.device)
        theirs = _peer_logits(Path(folder), torch.bfloat16, tokens, bench.device)
    errors = {f"our_{name}": value for name, value in logit_errors(ours, exact).items()}
    errors |= {f"their_{name}": value for name, value in logit_errors(theirs, exact).items()}
    return {"peer": "transformers", "peer_version": version, **errors}


def logit_errors(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Of logits [R, V]: relative errors, the divergence from fp64's distribution, and equal best tokens.

    A near tie of a router changes a whole row, so that the median row says more than all rows.
    """
    found = found.double()
    rows = (found - exact).norm(dim=1) / exact.norm(dim=1)
    log_p, log_q = exact.log_softmax(-1), found.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    return {
        "median_error": float(rows.median()),
        "total_error": float((found - exact).norm() / exact.norm()),
        "mean_kl": float(divergence.mean()),
        "same_best": float((found.argmax(-1) == exact.argmax(-1)).double().mean()),
    }


def _own_logits(model_dir: Path, tokens: np.ndarray, device: torch.device) -> torch.Tensor:
    n_pages = -(-len(tokens) // _BLOCK_TOKENS)
    # The interpreter has no bf16 arithmetic.
    dtypes = {} if device.type == "cuda" else {"compute_dtype": "float32", "kv_dtype": "float32"}
    options = RunnerOptions(
        n_pages=n_pages,
        block_tokens=_BLOCK_TOKENS,
        device=str(device),
        kernels="triton",
        **dtypes,  # type: ignore[arg-type]
    )
    positions = np.arange(len(tokens), dtype=np.int32)
    batch = ForwardBatch(
        token_ids=tokens,
        positions=positions,
        query_start=np.array([0, len(tokens)], np.int32),
        context_len=np.array([len(tokens)], np.int32),
        page_table=np.arange(n_pages, dtype=np.int32)[None],
        logit_rows=positions,
    )
    return ModelRunner.load(model_dir, options).forward(batch).logits


def _peer_logits(
    model_dir: Path, dtype: torch.dtype, tokens: np.ndarray, device: torch.device
) -> torch.Tensor:
    from bench.engine.transformers_peer import load_transformers

    model = load_transformers(model_dir, dtype).to(device)
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"  # torch's grouped products have no fp64
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(tokens).long().to(device)[None]).logits[0]
    return logits.double()
