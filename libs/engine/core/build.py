"""Builds engines and drafters from model directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from libs.engine.core.engine import PagedEngine
from libs.engine.core.paced_model import PacedModel
from libs.engine.core.torch_model import TorchModel
from libs.engine.eagle.block_config import is_block_head
from libs.engine.eagle.block_head import BlockHead
from libs.engine.eagle.context_head import ContextHead
from libs.engine.eagle.drafter import MAX_SEQUENCES, DrafterEngine
from libs.engine.eagle.head import EagleHead
from libs.engine.eagle.head_memory import local_contexts, parse_draft_config, read_head_memory
from libs.engine.graphs.buckets import BucketLimits
from libs.engine.graphs.step_graphs import MAX_GRAPH_BYTES, CudaGraphs, StepGraphs
from libs.engine.graphs.step_memory import StepMemory, estimate_step_memory
from libs.engine.kernels.device import free_device_bytes, open_device, open_triton_kernels
from libs.engine.kernels.device_name import CPU
from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.library import load_library
from libs.engine.kernels.native import NativeKernels
from libs.engine.kv.cache import CacheShape
from libs.engine.model.checkpoint import weights_digest
from libs.engine.model.runner import KernelsName, ModelRunner, RunnerOptions, threads_at_start
from libs.engine.model.weights import ComputeDtype
from libs.engine.model_spec.config import ModelConfig, load_config
from libs.engine.model_spec.config_json import read_config_json
from libs.engine.model_spec.plan import long_prompt_rows
from libs.engine.parallel.limits import check_group
from libs.engine.parallel.sizes import ParallelSizes
from libs.engine.step.load_progress import LoadProgress
from libs.engine.step.types import Engine
from slipstream.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from libs.engine.parallel.group_runner import GroupRunner

# The default size of the KV cache: pages for so many full context windows, within a bound in bytes.
_DEFAULT_CONTEXTS = 4
_DEFAULT_KV_BYTES = 256 << 20
DecodeStepsName = Literal["ahead", "graphs", "plain"]
_LONGEST_STEPS = 4  # a step of a long prompt has at most so many times the usual rows


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model.

    n_pages, kv_memory_bytes  size of the KV cache; at most one of them
    memory_bytes              what weights and KV cache may take together; None = what the process may use
    draft_model_dir           EAGLE-3 head whose features the engine computes; None = none
    head_bytes                of memory_bytes, for a draft head on the same device
    features_on_device        features stay there for that head; else they are copied to the host
    device                    cpu, cuda or cuda:N: where weights, KV cache and kernels are
    max_context_tokens        longest context; None = the model's, or what the KV cache holds
    max_batch                 sequences in one step
    step_tokens               rows in one step: the budget that chunked prefill shares with decode
    compute_dtype             of products with bf16 and INT4 weights; auto = bf16 where a unit exists,
                              avx512_bf16 = the same, but without AMX
    threads                   CPU threads of a step; None = OMP_NUM_THREADS, or all cores
    progress                  follows the weights that are read, and the decode steps that are captured
    packed_dir                where processes of a host share packed weights; None = each has its own
    decode_steps              on a CUDA device: ahead = graphs, and the next step begins before the tokens of
                              the last one are read; graphs = one launch a step; plain = one a program
    parallel                  how the model is cut over processes; None = one process
    """

    n_pages: int | None = None
    kv_memory_bytes: int | None = None
    memory_bytes: int | None = None
    block_tokens: int = 64
    draft_model_dir: Path | None = None
    head_bytes: int = 0
    features_on_device: bool = False
    max_context_tokens: int | None = None
    max_batch: int = 64
    step_tokens: int = 512
    max_draft_tokens: int = 8
    weight_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    kernels: KernelsName = "native"
    compute_dtype: ComputeDtype = "auto"
    threads: int | None = None
    progress: LoadProgress | None = None
    packed_dir: Path | None = None
    least_step_s: float = 0.0
    parallel: ParallelSizes | None = None
    decode_steps: DecodeStepsName = "plain"


def build_engine(model_dir: Path, options: EngineOptions | None = None) -> PagedEngine:
    """Load a checkpoint. Raises InvalidArgument or CheckpointError, naming the defect."""
    options = options or EngineOptions()
    config = load_config(model_dir)
    if options.draft_model_dir is not None:
        _check_head(options.draft_model_dir, config)
    if options.parallel is not None:
        check_group(
            options.parallel,
            device=options.device,
            kernels=options.kernels,
            block_tokens=options.block_tokens,
            decode_steps=options.decode_steps,
        )
    kv_dtype = config.kv_dtype(options.weight_dtype, options.kv_dtype)
    page = CacheShape(1, config.n_layers, options.block_tokens, config.latent_width, kv_dtype)
    _check_context(config, page.page_bytes, options)
    steps = _step_memory(config, options)
    runner_options = RunnerOptions(
        n_pages=_n_pages(config, page.page_bytes, options),
        block_tokens=options.block_tokens,
        weight_dtype=options.weight_dtype,
        kv_dtype=options.kv_dtype,
        device=options.device,
        kernels=options.kernels,
        compute_dtype=options.compute_dtype,
        head_dir=options.draft_model_dir,
        threads=options.threads,
        memory_bytes=options.memory_bytes,
        step_bytes=0 if steps is None else steps.n_bytes,
        head_bytes=options.head_bytes,
        progress=options.progress,
        packed_dir=options.packed_dir,
    )
    model = TorchModel(
        _load(model_dir, runner_options, options.parallel),
        max_batch=options.max_batch,
        max_context_tokens=options.max_context_tokens,
        max_draft_tokens=options.max_draft_tokens,
        drafter_digest=weights_digest(options.draft_model_dir) if options.draft_model_dir else "",
        graphs=_open_graphs(steps, options),
        features_on_device=options.features_on_device,
    )
    model.capture_decode_steps(options.progress)
    paced = PacedModel(model, options.least_step_s) if options.least_step_s else model
    expands = options.device == "cpu" and options.kernels == "native"
    long_step_tokens = min(long_prompt_rows(config), _LONGEST_STEPS * options.step_tokens) if expands else 0
    return PagedEngine(
        paced,
        step_tokens=options.step_tokens,
        long_step_tokens=long_step_tokens,
        steps_ahead=options.decode_steps == "ahead" and options.device != "cpu" and paced is model,
    )


def _step_memory(config: ModelConfig, options: EngineOptions) -> StepMemory | None:
    """The memory of decode steps as graphs. A CPU runs none: its launches cost nothing to save."""
    if options.device == "cpu" or options.decode_steps == "plain":
        return None
    has_features = options.draft_model_dir is not None and options.max_draft_tokens > 0
    context_tokens = options.max_context_tokens or config.max_position_tokens
    return estimate_step_memory(
        BucketLimits(options.max_batch, options.max_draft_tokens + 1, has_features),
        vocab_size=config.vocab_size,
        feature_width=config.hidden_size if has_features else 0,
        n_blocks=-(-context_tokens // options.block_tokens),
    )


def _open_graphs(steps: StepMemory | None, options: EngineOptions) -> StepGraphs | None:
    if steps is None:
        return None
    return CudaGraphs(open_device(options.device), max_bytes=max(MAX_GRAPH_BYTES, steps.pool_bytes))


def _load(
    model_dir: Path, options: RunnerOptions, parallel: ParallelSizes | None
) -> ModelRunner | GroupRunner:
    if parallel is None or parallel.n_ranks == 1:
        return ModelRunner.load(model_dir, options)
    from libs.engine.parallel.group_runner import GroupRunner

    return GroupRunner.load(model_dir, options, parallel)


def build_drafter(
    head_dir: Path,
    target_dir: Path,
    *,
    kernels: Kernels | None = None,
    threads: int | None = None,
    device: str = CPU,
    max_sequences: int = MAX_SEQUENCES,
) -> DrafterEngine:
    """Load an EAGLE-3 head or a block drafter. Tensors that it shares with the target come from the target.

    kernels        those of an engine on the same thread; None = own ones, and this thread's torch keeps one
                   thread
    threads        CPU threads of own kernels; None = what torch started with (OMP_NUM_THREADS, or all cores)
    device         of own kernels: cpu, cuda or cuda:N
    max_sequences  contexts that the head holds

    Raises FailedPrecondition, before it reads weights, where the device is missing or has too little room.
    """
    is_alone = kernels is None
    if kernels is None:
        placed = open_device(device)
        threads = threads or threads_at_start()
        torch.set_num_threads(threads)
        if placed.type == "cuda":
            kernels = open_triton_kernels(placed, torch.bfloat16)
            _check_head_room(head_dir, device, max_sequences)
        else:
            kernels = NativeKernels(load_library(), threads)
    head: ContextHead = (
        BlockHead(head_dir, target_dir, kernels)
        if is_block_head(read_config_json(head_dir, "draft_model_dir"))
        else EagleHead.load(head_dir, target_dir, kernels)
    )
    if is_alone:
        torch.set_num_threads(1)  # torch's idle threads would spin on the cores of the kernels' pool
    return DrafterEngine(head, max_sequences=max_sequences)


def _check_head_room(head_dir: Path, device: str, max_sequences: int) -> None:
    free_bytes = free_device_bytes(device) or 0
    head_bytes = read_head_memory(head_dir).n_bytes(max_sequences)
    if head_bytes > free_bytes:
        raise FailedPrecondition(
            f"a draft head of {head_bytes / 1e9:.3f} GB with {max_sequences} contexts does not fit in the "
            f"{free_bytes / 1e9:.3f} GB that are free on {device}"
        )


def build_local_drafter(engine: Engine, head_dir: Path, target_dir: Path) -> DrafterEngine:
    """Load a head that runs on the thread of `engine`, with its kernels, and so on its device."""
    model = engine.model if isinstance(engine, PagedEngine) else None
    model = model.model if isinstance(model, PacedModel) else model
    kernels = model.kernels if isinstance(model, TorchModel) else None
    max_sequences = MAX_SEQUENCES
    if kernels is not None and kernels.device.type == "cuda":
        max_sequences = local_contexts(engine.info.max_batch)
    return build_drafter(head_dir, target_dir, kernels=kernels, max_sequences=max_sequences)


def _check_head(head_dir: Path, config: ModelConfig) -> None:
    raw = read_config_json(head_dir, "draft_model_dir")
    try:
        head = parse_draft_config(raw)
    except InvalidArgument as error:  # the model has a config.json with such keys, too
        raise InvalidArgument("draft_model_dir", f"{head_dir / 'config.json'}: {error.message}") from None
    if (head.hidden_size, head.vocab_size) != (config.hidden_size, config.vocab_size):
        raise InvalidArgument(
            "draft_model_dir",
            f"hidden and vocabulary size {head.hidden_size}, {head.vocab_size} are not "
            f"the target's {config.hidden_size}, {config.vocab_size}",
        )


def _n_pages(config: ModelConfig, page_bytes: int, options: EngineOptions) -> int:
    if options.n_pages is not None and options.kv_memory_bytes is not None:
        raise InvalidArgument("kv_memory_bytes", "give either this or n_pages")
    if options.n_pages is not None:
        return options.n_pages
    if options.kv_memory_bytes is not None:
        if options.kv_memory_bytes < page_bytes:
            raise InvalidArgument(
                "kv_memory_bytes",
                f"{options.kv_memory_bytes} is less than one block of {options.block_tokens} tokens: "
                f"{page_bytes} bytes",
            )
        return options.kv_memory_bytes // page_bytes
    contexts = _DEFAULT_CONTEXTS * config.max_position_tokens // options.block_tokens
    return max(min(contexts, _DEFAULT_KV_BYTES // page_bytes), 1)


def _check_context(config: ModelConfig, page_bytes: int, options: EngineOptions) -> None:
    """Raises InvalidArgument for a stated context that the model or the KV cache cannot hold."""
    wanted, most = options.max_context_tokens, config.max_position_tokens
    if wanted is None:
        return
    if wanted > most:
        raise InvalidArgument("max_context_tokens", f"{wanted} is more than the model's {most}")
    pages = -(-wanted // options.block_tokens)
    missing = pages - _n_pages(config, page_bytes, options)
    if missing > 0:
        raise InvalidArgument(
            "max_context_tokens",
            f"{wanted} tokens need a KV cache of {pages * page_bytes / 1e9:.3f} GB: "
            f"{missing * page_bytes / 1e9:.3f} GB are missing (--kv-memory-bytes, --memory-bytes)",
        )
