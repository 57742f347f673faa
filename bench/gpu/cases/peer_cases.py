"""Our kernels and those of other projects in turn, in one process, on the same inputs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.gpu.case import Bench, Figure, ReportCase
from bench.gpu.cases.installed import check_installed
from bench.gpu.cases.kernel_cases import FULL, SMALL, KernelCase, kernel_cases
from bench.gpu.cases.peers import PEERS, KernelPeer
from bench.gpu.cases.sampling_cases import KINDS, sampling_run
from bench.gpu.timing import alternating_us

_VOCAB_SIZE = 163840


def peer_cases(bench: Bench) -> Iterator[ReportCase]:
    kernels = list(kernel_cases(SMALL if bench.is_miniature else FULL))
    for peer in PEERS:
        for kernel in (each for each in kernels if each.name == peer.case):
            setting = f"{kernel.setting}, beside {peer.package}"
            yield ReportCase(kernel.name, setting, partial(_measure, bench, kernel, peer))
    for n_rows in (1, 3) if bench.is_miniature else (1, 32, 256):
        setting = f"top_k_top_p, {n_rows} rows, beside flashinfer"
        yield ReportCase("sample", setting, partial(_measure_sampling, bench, n_rows))


def _measure(bench: Bench, kernel: KernelCase, peer: KernelPeer) -> Figure:
    version = check_installed(peer.package, peer.install)
    ours = kernel.prepare(bench.device)
    theirs = peer.prepare(ours)
    result, other = ours.run(), theirs()
    times = alternating_us([ours.run, theirs], bench.device, bench.repeats)
    return {
        **_compared(peer.package, version, times),
        "note": peer.note,
        "difference": relative_difference(result, other) if peer.compares else None,
    }


def _measure_sampling(bench: Bench, n_rows: int) -> Figure:
    version = check_installed("flashinfer", "pip install flashinfer-python")
    draw = importlib.import_module("flashinfer.sampling").top_k_top_p_sampling_from_logits
    vocab_size = 500 if bench.is_miniature else _VOCAB_SIZE
    logits, ours = sampling_run(bench.device, "top_k_top_p", n_rows, vocab_size)
    params = KINDS["top_k_top_p"]

    def theirs() -> list[int]:
        tokens: list[int] = draw(logits / params.temperature, params.top_k, params.top_p).tolist()
        return tokens

    times = alternating_us([ours, theirs], bench.device, bench.repeats)
    return _compared("flashinfer", version, times) | {
        "note": "the peer draws other tokens",
        "difference": None,
    }


def _compared(package: str, version: str, times: list[float]) -> Figure:
    """`ratio`: their time over ours, so that 2 is twice as fast."""
    return {
        "peer": package,
        "peer_version": version,
        "median_us": times[0],
        "peer_us": times[1],
        "ratio": times[1] / times[0],
    }


def relative_difference(ours: torch.Tensor, theirs: Any) -> float:
    wanted = theirs[0] if isinstance(theirs, tuple) else theirs
    ours, wanted = ours.double().flatten(), wanted.double().flatten()
    return float((ours - wanted).norm() / wanted.norm())
