"""The load of a checkpoint against raw reads of its files, and against a copy of as many bytes in memory.

    python -m bench.load --gb 4 --json
    python -m bench.load --gb 2 --formats int4 --dir /mnt/models    # a folder on the drive to measure

Writes random checkpoints with the matrices of Kimi-K2.5 (below 1 GB: smaller ones), measures, and removes
them. In each round, both sides run in turn, and a load is `ModelRunner.load` in a new process. "drive": raw
reads of the files with as many threads, with direct I/O where the file system has it, then a load, each
after the files left the page cache. "cache": a copy in memory by all cores, then a load from the page cache.
Both again as "packed": the load maps the file that a first load has packed (`pack_s`), and the raw reads are
of that file. Rates are GB of files a second. `peak_mb` is the most memory of a load above that of the loaded
weights, of all loads.

The host of a virtual machine may take back free memory, and give it only at the first touch. That costs more
than the load, and no raw read pays it. So the process of a load first touches the memory that the load will
need, at `touch_gb_s`, and frees it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from bench.command_line import bench_parser
from bench.gpu.counting.model_shapes import KIMI_K25_CONFIG
from bench.medians import medians_of, print_medians
from libs.engine.kernels.device import open_device
from libs.engine.kernels.panel_memory import map_huge_pages
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.inventory import check_inventory, linears, vectors
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model.shard_reader import N_THREADS
from libs.engine.model.shards import INDEX_NAME
from libs.engine.model_spec.config import ModelConfig, load_config
from libs.engine.model_spec.quantization import Fp8Blocks, Int4Groups
from tests.support.random_checkpoint import BENCH_CONFIG, RandomCheckpoint, write_config

_QUANTIZATIONS: dict[str, Literal["int4", "fp8", "none"]] = {"int4": "int4", "bf16": "none", "fp8": "fp8"}
FORMATS = tuple(_QUANTIZATIONS)
_WIDE_BYTES = 1e9
# One dense layer and two of experts with the matrices of Kimi-K2.5; the vocabulary and the dense MLP are cut.
_MATRICES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "moe_intermediate_size",
)
_WIDE_CONFIG = BENCH_CONFIG | {key: KIMI_K25_CONFIG[key] for key in _MATRICES} | {"intermediate_size": 2048}
_N_LAYERS = 3
_PIECE_BYTES = 4 << 20
_COPY_BYTES = 256 << 20


def write_checkpoint(model_dir: Path, n_bytes: float, weight_format: str) -> int:
    """Write about `n_bytes`, one shard a layer; returns the size of the shards."""
    config = write_config(model_dir, _spec(n_bytes, weight_format))
    weight_map: dict[str, str] = {}
    for index, names in enumerate(_by_shard(config)):
        shard = f"model-{index}.safetensors"
        tensors = dict(_random_tensors(config, names))
        save_file(tensors, model_dir / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (model_dir / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    _flush(model_dir.glob("*.safetensors"))
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def _spec(n_bytes: float, weight_format: str) -> RandomCheckpoint:
    """The spec with as many experts as reach the size."""
    config = dict(_WIDE_CONFIG if n_bytes >= _WIDE_BYTES else BENCH_CONFIG) | {"num_hidden_layers": _N_LAYERS}
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    bits = {"int4": 4.5, "fp8": 8}.get(weight_format, 16)
    n_experts = int(n_bytes * 0.8 / (expert * bits / 8) / (_N_LAYERS - 1))
    config["n_routed_experts"] = max(n_experts, config["num_experts_per_tok"])
    return RandomCheckpoint(config=config, quantization=_QUANTIZATIONS[weight_format])


def _by_shard(config: ModelConfig) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of each layer, and of what is in no layer."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(config.n_layers + 1)]
    shapes = [*vectors(config), *((f"{name}.weight", (rows, cols)) for name, rows, cols in linears(config))]
    for name, shape in [*shapes, ("lm_head.weight", (config.vocab_size, config.hidden_size))]:
        index = int(name.split(".")[1]) if name.startswith("layers.") else config.n_layers
        shards[index].append((name if name.startswith("lm_head") else f"model.{name}", shape))
    return shards


def _random_tensors(
    config: ModelConfig, names: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Values from a pool of random ones: none is repeated within a matrix."""
    largest = max(int(np.prod(shape)) for _, shape in names)
    normal = torch.randn(largest).mul_(config.hidden_size**-0.5).to(torch.bfloat16)
    words = torch.randint(-(2**31), 2**31, (largest // 8 + 1,), dtype=torch.int64).to(torch.int32)
    for name, shape in names:
        count = int(np.prod(shape))
        if isinstance(config.quantization, Int4Groups) and ".experts." in name:
            rows, cols = shape
            stem, groups = name.removesuffix("weight"), cols // config.quantization.group_size
            yield f"{stem}weight_packed", words[: count // 8].view(rows, cols // 8).clone()
            yield f"{stem}weight_scale", normal[: rows * groups].abs().view(rows, groups)
            yield f"{stem}weight_shape", torch.tensor(shape, dtype=torch.int32)
        elif isinstance(config.quantization, Fp8Blocks) and name.endswith("_proj.weight"):
            rows, cols = shape
            blocks = (-(-rows // config.quantization.rows), -(-cols // config.quantization.cols))
            yield name, normal[:count].mul(448).clamp_(-448, 448).view(shape).to(torch.float8_e4m3fn)
            yield f"{name}_scale_inv", torch.full(blocks, 1 / 448)
        else:
            yield name, normal[:count].view(shape).clone()


def _flush(paths: Iterable[Path]) -> None:
    """Dirty pages would stay in the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def evict(paths: Sequence[Path]) -> None:
    """Ask the kernel to drop the files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_read_s(paths: Sequence[Path], *, direct: bool) -> float:
    """Time to read all files in pieces, by the loader's number of threads."""
    pieces = [(path, at) for path in paths for at in range(0, path.stat().st_size, _PIECE_BYTES)]
    files = {path: _open(path, direct=direct) for path in paths}

    def read(own: Sequence[tuple[Path, int]]) -> None:
        memory = map_huge_pages(_PIECE_BYTES)  # a drive reads twice as fast into them
        for path, at in own:
            os.preadv(files[path], [memory], at)

    with ThreadPoolExecutor(N_THREADS) as pool:
        found_s = _timed(lambda: list(pool.map(read, (pieces[i::N_THREADS] for i in range(N_THREADS)))))
    for descriptor in files.values():
        os.close(descriptor)
    return found_s


def _open(path: Path, *, direct: bool) -> int:
    if direct:
        try:
            return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:  # the file system has no direct I/O
            pass
    return os.open(path, os.O_RDONLY)


def copy_s(n_bytes: int) -> float:
    """Time to copy so many bytes between two buffers that are in memory, by all cores."""
    source, target = (np.ones(_COPY_BYTES, np.uint8) for _ in range(2))
    n_parts = os.cpu_count() or 1
    spans = [slice(_COPY_BYTES * i // n_parts, _COPY_BYTES * (i + 1) // n_parts) for i in range(n_parts)]
    with ThreadPoolExecutor(n_parts) as pool:
        once_s = statistics.median(
            _timed(lambda: list(pool.map(lambda span: np.copyto(target[span], source[span]), spans)))
            for _ in range(5)
        )
    return once_s * n_bytes / _COPY_BYTES


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def load_once(model_dir: Path, packed_dir: Path | None, device: str = "cpu") -> dict[str, float]:
    """Time of a load in this process, and its peak memory in the host above the weights that are there."""
    with Checkpoint(model_dir) as checkpoint:
        held_bytes = check_inventory(checkpoint, load_config(model_dir))
    if device != "cpu":
        held_bytes = 0
        torch.zeros(1, device=open_device(device))  # the context of the device takes seconds
    touch_s = _timed(lambda: _touch(held_bytes))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present memory
    before_bytes = _memory_bytes("VmRSS")
    kept: list[ModelRunner] = []
    options = RunnerOptions(n_pages=1, packed_dir=packed_dir, device=device)
    load_s = _timed(lambda: kept.append(ModelRunner.load(model_dir, options)))
    peak_bytes = _memory_bytes("VmHWM") - before_bytes - held_bytes
    return {"load_s": load_s, "peak_bytes": peak_bytes, "touch_gb_s": held_bytes / 1e9 / touch_s}


def _touch(n_bytes: int) -> None:
    """Write to new huge pages of so many bytes, and free them."""
    with mmap.mmap(-1, n_bytes + _PIECE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _load_in_child(model_dir: Path, packed_dir: Path | None = None, device: str = "cpu") -> dict[str, float]:
    command = [sys.executable, "-m", "bench.load", "--load", str(model_dir), "--device", device]
    command += ["--packed-dir", str(packed_dir)] if packed_dir else []
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def measure(model_dir: Path, rounds: int, device: str = "cpu") -> dict[str, float]:
    """Medians over the rounds; a ratio is that of one round. Nothing is packed for another device."""
    paths, folder = sorted(model_dir.glob("*.safetensors")), model_dir / "packed"
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        row = _sides(model_dir, paths, None, device)
        if device != "cpu":
            rows.append(row)
            continue
        row["pack_s"] = _load_in_child(model_dir, folder)["load_s"]
        packed = sorted(folder.glob("*.packed"))
        _flush(packed)
        found = _sides(model_dir, packed, folder)
        peak_mb = max(row["peak_mb"], found["peak_mb"])
        rows.append(row | {f"packed_{name}": value for name, value in found.items()} | {"peak_mb": peak_mb})
    shutil.rmtree(folder, ignore_errors=True)
    return medians_of(rows)


def _sides(
    model_dir: Path, paths: Sequence[Path], packed_dir: Path | None, device: str = "cpu"
) -> dict[str, float]:
    """Reads and copies of the files, and loads that read them."""
    n_bytes = sum(path.stat().st_size for path in paths)
    evict(paths)
    raw_s = raw_read_s(paths, direct=True)
    evict(paths)
    drive = _load_in_child(model_dir, packed_dir, device)
    raw_read_s(paths, direct=False)
    memory_s, cached = copy_s(n_bytes), _load_in_child(model_dir, packed_dir, device)
    gb = n_bytes / 1e9
    return {
        "raw_gb_s": gb / raw_s,
        "drive_gb_s": gb / drive["load_s"],
        "drive_ratio": raw_s / drive["load_s"],
        "copy_gb_s": gb / memory_s,
        "cache_gb_s": gb / cached["load_s"],
        "cache_ratio": memory_s / cached["load_s"],
        "peak_mb": max(drive["peak_bytes"], cached["peak_bytes"]) / 1e6,
        "touch_gb_s": drive["touch_gb_s"],
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser("load", __doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--formats", default=",".join(FORMATS), help="some of " + ", ".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where the checkpoints are written; a temporary folder")
    parser.add_argument("--device", default="cpu", help="where the weights go: cpu or cuda:N")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # what a measured process does
    parser.add_argument("--packed-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each format, and print the medians."""
    options = _options(arguments)
    if options.load:
        print(json.dumps(load_once(options.load, options.packed_dir, options.device)))
        return
    found: dict[str, Any] = {}
    for weight_format in options.formats.split(","):
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-load-") as folder:
            n_bytes = write_checkpoint(Path(folder), options.gb * 1e9, weight_format)
            found[weight_format] = {"gb": round(n_bytes / 1e9, 3)} | measure(
                Path(folder), options.rounds, options.device
            )
    print_medians(found, as_json=options.json)


if __name__ == "__main__":
    main()
