"""A loaded model with its KV cache and one operation, `forward` over a batch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from libs.common.runtime.memory_limit import memory_limit_bytes
from libs.engine.kernels.device import free_device_bytes, open_device, open_triton_kernels
from libs.engine.kernels.interface import Kernels
from libs.engine.kernels.library import load_library
from libs.engine.kernels.native import NativeKernels
from libs.engine.kernels.native_stack import NativeStack
from libs.engine.kernels.torch_kernels import TorchKernels
from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.model.checkpoint import Checkpoint, weights_digest
from libs.engine.model.decoder import Decoder
from libs.engine.model.feature_head import load_feature_head
from libs.engine.model.inventory import check_inventory
from libs.engine.model.shards import shard_names
from libs.engine.model.stack import FusedStack, PlainStack, Stack
from libs.engine.model.weights import ComputeDtype, ModelWeights, WeightDtype, WeightLoader
from libs.engine.model_spec.config import ModelConfig, load_config
from libs.engine.model_spec.plan import plan_batch
from libs.engine.model_spec.rope import Rope
from libs.engine.packed.packed_key import packed_key, packed_path
from libs.engine.packed.shared_weights import PackedSource, open_shared_weights
from libs.engine.packed.weight_store import PrivateWeights, WeightStore
from libs.engine.sampling.prompt_scoring import score_prompts
from libs.engine.step.batch import ForwardBatch, ForwardOutput
from libs.engine.step.load_progress import LoadProgress
from libs.engine.step.stop_flag import StepAborted, StopFlag
from slipstream.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from libs.engine.kernels.gpu.triton_kernels import TritonKernels

KernelsName = Literal["native", "torch", "triton"]
_MATRIX_UNIT_TOKENS = 16  # the attention of a device takes tiles of a page


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint.

    weight_dtype    dtype the weights are held in; "auto" keeps the checkpoint's own (int4 experts stay int4)
    kv_dtype        dtype of the latent cache; "auto" = bfloat16 when the checkpoint is, else float32
    device          "cpu", "cuda" or "cuda:N"; on a CUDA device the kernels are Triton's
    kernels         "native" = compiled C, "torch" = the reference path, several times slower; "triton" on the
                    CPU = Triton's interpreter, for tests
    compute_dtype   "auto" = products of bf16 and INT4 weights in bf16 with fp32 sums where the processor has
                    a unit for them (a CUDA device has), else fp32; "avx512_bf16" = the same without AMX,
                    which adds in another order; "float32" = always fp32
    latent_norm_eps epsilon of the q and kv latent norms; 1e-6 as transformers, None = rms_norm_eps as others
    head_dir        EAGLE-3 head directory whose `fc.weight` fuses the features; None = no features
    memory_bytes    what weights and cache may take together; None = the machine's or the container's
    step_bytes      of that memory, for decode steps as graphs
    head_bytes      of that memory, for a draft head on the same device
    threads         CPU threads of the kernels; None = what torch started with (OMP_NUM_THREADS, or all cores)
    progress        follows the weights that are read; None = it is not followed
    packed_dir      where processes share packed weights (compiled kernels only); None = each has its own
    """

    n_pages: int = 64
    block_tokens: int = 64
    weight_dtype: WeightDtype = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    kernels: KernelsName = "native"
    compute_dtype: ComputeDtype = "auto"
    latent_norm_eps: float | None = 1e-6
    head_dir: Path | None = None
    memory_bytes: int | None = None
    step_bytes: int = 0
    head_bytes: int = 0
    threads: int | None = None
    progress: LoadProgress | None = None
    packed_dir: Path | None = None


class ModelRunner:
    """A loaded model with its cache. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        cache: PagedLatentCache,
        *,
        kernels: str,
        feature_width: int,
        weights_digest: str,
    ) -> None:
        self.config = config
        self.cache = cache
        self.device = cache.pages.device
        self.page_parts = None
        self.kernels = kernels  # "native", "torch" or "triton"
        self.feature_width = feature_width  # hidden size of the features, 0 without a head
        self.weights_digest = weights_digest  # hex; equal for equal checkpoints
        self.decoder = decoder
        self.rope = Rope(config)

    @classmethod
    def load(cls, model_dir: Path, options: RunnerOptions | None = None) -> ModelRunner:
        """Load a checkpoint directory. Raises CheckpointError or InvalidArgument, naming the defect."""
        options = options or RunnerOptions()
        config = load_config(model_dir)
        kernels = choose_kernels(options)
        shape = cache_shape(config, options)
        digest = start_digest(model_dir)
        with Checkpoint(model_dir, options.progress) as checkpoint:
            held_bytes = check_inventory(checkpoint, config)
            check_memory(held_bytes, shape, options)
            with open_weights(model_dir, kernels, options, held_bytes, digest) as store:
                weights = WeightLoader(checkpoint, config, kernels, options.weight_dtype, store).load()
        features = load_feature_head(options.head_dir, config, kernels) if options.head_dir else None
        if isinstance(kernels, NativeKernels):
            torch.set_num_threads(1)  # torch's idle threads would spin on the cores of the kernels' pool
        eps = config.rms_norm_eps if options.latent_norm_eps is None else options.latent_norm_eps
        return cls(
            config,
            Decoder(config, weights, _stack(config, weights, kernels, eps), kernels, features),
            PagedLatentCache(shape, device=options.device),
            kernels=kernels.name,
            feature_width=config.hidden_size if features else 0,
            weights_digest=digest.result(),
        )

    @property
    def loaded_kernels(self) -> Kernels:
        """The kernels of the model, for a draft head on the same thread."""
        return self.decoder.kernels

    def close(self) -> None:
        """Do nothing: the runner has no other process, as a group has."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, stop: StopFlag | None = None) -> ForwardOutput:
        """Write the latents of all rows into the cache; return the wanted logits, features and scores.

        Raises InvalidArgument, before any write, for an inconsistent batch. Raises StepAborted soon after
        `stop` was set; the cache slots of the batch's rows are then undefined.
        """
        plan = plan_batch(batch, self.config, self.rope, self.cache)
        token_ids = torch.from_numpy(batch.token_ids).long()
        x, features = self.decoder.run(token_ids, plan, want_features=batch.want_features, stop=stop)

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            if stop is not None and stop.is_set:
                raise StepAborted
            return self.decoder.logits(x[self.decoder.kernels.place(rows)])

        scores = score_prompts(batch, logits_of, vocab_size=self.config.vocab_size)
        wanted = self.decoder.kernels.place(torch.from_numpy(batch.logit_rows).long())
        return ForwardOutput(self.decoder.logits(x[wanted]), features, scores)


def start_digest(model_dir: Path) -> Future[str]:
    """The digest of the weights, whose many small reads run beside the load."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="digest")
    digest = pool.submit(weights_digest, model_dir)
    pool.shutdown(wait=False)
    return digest


def open_weights(
    model_dir: Path, kernels: Kernels, options: RunnerOptions, held_bytes: int, digest: Future[str]
) -> AbstractContextManager[WeightStore]:
    """Where the weights of this load are."""
    if options.packed_dir is None or not isinstance(kernels, NativeKernels):
        return nullcontext(PrivateWeights(kernels.device))
    library, dtype = kernels.library_path, options.weight_dtype
    source = PackedSource(
        path=packed_path(options.packed_dir, model_dir, library, dtype),
        key=lambda: packed_key(model_dir, shard_names(model_dir), library, dtype, digest.result()),
        expected_bytes=held_bytes,
        make_packer=kernels.packer_into,
    )
    return open_shared_weights(source, options.progress or LoadProgress())


def choose_kernels(options: RunnerOptions) -> Kernels:
    """Raises InvalidArgument or FailedPrecondition when this machine lacks the device that was asked for."""
    device = open_device(options.device)
    if device.type == "cuda" and options.block_tokens % _MATRIX_UNIT_TOKENS:
        raise InvalidArgument(
            "block_tokens",
            f"{options.block_tokens} is no multiple of {_MATRIX_UNIT_TOKENS}: {device} needs one",
        )
    threads = choose_threads(options)
    torch.set_num_threads(threads)
    if device.type == "cuda" or options.kernels == "triton":
        dtype = torch.float32 if options.compute_dtype == "float32" else torch.bfloat16
        return open_triton_kernels(device, dtype)
    if options.kernels == "torch":
        return TorchKernels()
    library = load_library(bf16=options.compute_dtype != "float32", amx=options.compute_dtype == "auto")
    return NativeKernels(library, threads)


def choose_threads(options: RunnerOptions) -> int:
    return options.threads or threads_at_start()


@cache
def threads_at_start() -> int:
    """The threads of torch at the first call; a load changes them."""
    return torch.get_num_threads()


def check_memory(weight_bytes: int, cache: CacheShape, options: RunnerOptions) -> None:
    cache_bytes = cache.n_pages * cache.page_bytes
    limit = options.memory_bytes
    if limit is None:
        limit = free_device_bytes(options.device) or memory_limit_bytes()
    missing = weight_bytes + cache_bytes + options.step_bytes + options.head_bytes - limit
    if missing > 0:
        steps = f", decode steps of {options.step_bytes / 1e9:.3f} GB" if options.step_bytes else ""
        steps += f", a draft head of {options.head_bytes / 1e9:.3f} GB" if options.head_bytes else ""
        raise FailedPrecondition(
            f"weights of {weight_bytes / 1e9:.3f} GB{steps} and a KV cache of {cache_bytes / 1e9:.3f} GB "
            f"do not fit in {limit / 1e9:.3f} GB of memory: {missing / 1e9:.3f} GB are missing"
        )


def _stack(config: ModelConfig, weights: ModelWeights, kernels: Kernels, latent_norm_eps: float) -> Stack:
    if isinstance(kernels, NativeKernels):
        return NativeStack(config, weights.layers, kernels, latent_norm_eps)
    if kernels.name == "triton":
        return FusedStack(config, weights.layers, cast("TritonKernels", kernels), latent_norm_eps)
    return PlainStack(config, weights.layers, kernels, latent_norm_eps)


def cache_shape(config: ModelConfig, options: RunnerOptions) -> CacheShape:
    kv_dtype = config.kv_dtype(options.weight_dtype, options.kv_dtype)
    return CacheShape(options.n_pages, config.n_layers, options.block_tokens, config.latent_width, kv_dtype)
