"""Settings of the workers that run a model, and the engine that they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from libs.common.runtime.process_settings import TierSettings
from libs.common.runtime.settings import rows, setting
from libs.common.worker_bounds import DEFAULT_BATCH, MAX_BATCH, MAX_STEP_TOKENS, MAX_THREADS
from libs.engine.kernels.device_name import CPU, cuda_index
from libs.engine.parallel.limits import CPU_KERNELS, check_group
from libs.engine.parallel.sizes import ParallelSizes, parse_sizes
from libs.engine.step.draft_head import MAX_DRAFT_TOKENS, DraftHead
from libs.engine.step.load_progress import LoadProgress
from libs.engine.step.types import Engine
from libs.planner.decode_room import DecodeStepRoom, DraftHeadRoom
from libs.planner.fit import CARD_OVERHEAD_BYTES
from libs.worker.engine.page_exporter import REGISTRATIONS, STAGED
from libs.worker.process.model_unusable import unusable_models
from libs.worker.restore.restore_budget import FLOOR_MS
from slipstream.errors import InvalidArgument

_PACKED, _OFF = "packed", "off"
_BY_OMP = "as OMP_NUM_THREADS says"
WeightDtype = Literal["auto", "float32", "bfloat16"]
ComputeDtype = Literal["auto", "avx512_bf16", "float32"]
DecodeStepsName = Literal["ahead", "graphs", "plain"]
_DTYPES = ("auto", "float32", "bfloat16")


def check_parallel(text: str) -> None:
    """Raises ValueError for what names no sizes of a group."""
    try:
        parse_sizes(text)
    except InvalidArgument as error:
        raise ValueError(error.reason) from None


@dataclass(frozen=True)
class WorkerSettings(TierSettings):
    """The settings of every worker of this kind."""

    model: Path | None = setting("checkpoint directory", default=None)
    draft_model: Path | None = setting("EAGLE-3 head directory; none = no draft features", default=None)
    device: str = setting(
        "cpu, cuda or cuda:N (docs/gpu.md)",
        default=CPU,
        check=cuda_index,
    )
    engine: str = setting(
        "fake: deterministic, without torch, for tests", default="torch", choices=("torch", "fake")
    )
    threads: int | None = setting(
        "CPU threads of the model", default=None, default_text=_BY_OMP, least=1, most=MAX_THREADS
    )


@dataclass(frozen=True)
class EngineSettings(WorkerSettings):
    """The settings of workers that own KV pages."""

    memory_bytes: int | None = setting(
        "memory of the worker, of the host or of each device",
        default=None,
        default_text="half of the machine's or container's; the device's free memory",
        least=1,
    )
    device_overhead_bytes: int = setting(
        "of --memory-bytes of a device: context, communication and activations",
        default=CARD_OVERHEAD_BYTES,
        least=0,
    )
    kv_memory_bytes: int | None = setting(
        "size of the KV cache",
        default=None,
        default_text="contexts of a full batch, or what --memory-bytes leaves",
    )
    weight_dtype: str = setting(
        "dtype of the weights in memory; auto = the checkpoint's", default="auto", choices=_DTYPES
    )
    kv_dtype: str = setting(
        "dtype of the KV cache, the same in the cluster; auto = the weights'", default="auto", choices=_DTYPES
    )
    compute_dtype: str = setting(
        "of products; auto = bf16 where the processor has a unit for it; avx512_bf16 = without AMX",
        default="auto",
        choices=("auto", "avx512_bf16", "float32"),
    )
    kv_registration: str = setting(
        "what peers read: staged = copies; direct = live pages, for RDMA and devices (docs/security.md)",
        default=STAGED,
        choices=REGISTRATIONS,
    )
    kv_staging_bytes: int | None = setting(
        "memory for staged copies", default=None, default_text="half of the KV cache, at most 4 GiB", least=1
    )
    block_tokens: int = setting("tokens of a KV block, the same in the cluster", default=64, least=1)
    max_batch: int = setting("sequences in one engine step", default=DEFAULT_BATCH, least=1, most=MAX_BATCH)
    max_context_tokens: int | None = setting(
        "longest context, prompt and answer",
        default=None,
        default_text="the model's, or what the KV cache holds",
        least=2,  # a token of each
    )
    step_tokens: int = setting(
        "rows of one step, prefill chunks included", default=512, least=1, most=MAX_STEP_TOKENS
    )
    packed_dir: str | None = setting(
        "directory of packed weights, which this host's processes share; off = none",
        default=None,
        default_text="packed in --run-dir",
    )
    parallel: str | None = setting(
        "ranks of this worker, as tp=2,pp=2,kv=2 (docs/parallelism.md)",
        default=None,
        default_text="one process",
        check=check_parallel,
    )
    restore_floor_ms: float = setting("least time that a prompt may wait for KV of others", default=FLOOR_MS)
    max_waiting: int = setting("sequences that may wait for KV pages", default=256)
    bench_step_ms: float = setting("least time of a step, for benchmarks", default=0.0)
    fake_pace_s: float = setting("with --engine fake: seconds each token takes", default=0.0)


def require_models(options: WorkerSettings, *names: str) -> None:
    """Raise InvalidArgument for those of these settings that are not stated, unless the engine is fake."""
    missing = [rows(WorkerSettings)[name].flag for name in names if getattr(options, name) is None]
    if missing and options.engine == "torch":
        raise InvalidArgument(", ".join(missing), "required with --engine torch")


def check_ranks(options: EngineSettings, decode_steps: DecodeStepsName) -> None:
    """Raise ModelUnusable for ranks that no worker runs on this device, or with these steps.

    Pure, so that the refusal comes before torch is imported and before a device is opened.
    """
    if options.engine != "torch" or not options.parallel:
        return
    with unusable_models(options):
        check_group(
            parse_sizes(options.parallel),
            device=options.device,
            kernels=CPU_KERNELS,
            block_tokens=options.block_tokens,
            decode_steps=decode_steps,
        )


def engine_builder(
    options: EngineSettings,
    progress: LoadProgress,
    *,
    decode_steps: DecodeStepsName = "plain",
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
    has_local_head: bool = False,
) -> Callable[[], Engine]:
    """The builder of the engine, on the thread that will own it, which writes `progress`. Torch is imported
    there, or not at all. `has_local_head`: `load_local_head` follows."""
    if options.engine == "fake":
        return lambda: _fake(options)
    require_models(options, "model")
    assert options.model is not None
    model_dir = options.model
    parallel = parse_sizes(options.parallel) if options.parallel else None

    def build() -> Engine:
        with unusable_models(options):
            head = _head_room(options, is_local=has_local_head)
            return _torch(options, model_dir, progress, parallel, decode_steps, max_draft_tokens, head)

    return build


def load_local_head(options: EngineSettings, engine: Engine) -> DraftHead:
    """The draft head beside an engine of `engine_builder`, on its thread."""
    if options.engine == "fake":
        from libs.engine.core.fake_head import FakeHead

        return FakeHead(feature_width=engine.info.feature_width)
    from libs.engine.core.build import build_local_drafter

    assert options.draft_model is not None and options.model is not None
    with unusable_models(options):
        return build_local_drafter(engine, options.draft_model, options.model)


def _head_room(options: EngineSettings, *, is_local: bool) -> DraftHeadRoom | None:
    """The room of a head on the engine's device; None without one, and for a host, which has room apart."""
    if cuda_index(options.device) is None or options.draft_model is None:
        return None
    from libs.engine.eagle.head_memory import BF16_BYTES, FP32_BYTES, read_head_memory

    value_bytes = FP32_BYTES if options.compute_dtype == "float32" else BF16_BYTES
    memory = read_head_memory(options.draft_model, value_bytes=value_bytes)
    return DraftHeadRoom(options.draft_model.name, memory, is_local, options.max_batch)


def _torch(
    options: EngineSettings,
    model_dir: Path,
    progress: LoadProgress,
    parallel: ParallelSizes | None,
    decode_steps: DecodeStepsName,
    max_draft_tokens: int,
    head: DraftHeadRoom | None,
) -> Engine:
    from libs.engine.core.build import EngineOptions, build_engine
    from libs.engine.kernels.device import free_device_bytes
    from libs.worker.process.kv_size import kv_cache_size, worker_memory

    memory = worker_memory(
        options.memory_bytes,
        free_device_bytes=free_device_bytes(options.device),
        device_overhead_bytes=options.device_overhead_bytes,
        staging_bytes=options.kv_staging_bytes,
        is_staged=options.kv_registration == STAGED,
    )
    has_drafts = options.draft_model is not None and max_draft_tokens > 0
    room = DecodeStepRoom(options.max_batch, max_draft_tokens, has_drafts, options.block_tokens)
    return build_engine(
        model_dir,
        EngineOptions(
            kv_memory_bytes=kv_cache_size(
                model_dir,
                memory,
                max_batch=options.max_batch,
                weight_dtype=options.weight_dtype,
                kv_dtype=options.kv_dtype,
                max_context_tokens=options.max_context_tokens,
                sizes=parallel,
                decode_steps=None if decode_steps == "plain" else room,
                draft_head_bytes=head.card_bytes if head is not None else 0,
                stated_bytes=options.kv_memory_bytes,
            ),
            device=options.device,
            memory_bytes=options.memory_bytes,
            weight_dtype=cast(WeightDtype, options.weight_dtype),
            kv_dtype=cast(WeightDtype, options.kv_dtype),
            compute_dtype=cast(ComputeDtype, options.compute_dtype),
            decode_steps=decode_steps,
            block_tokens=options.block_tokens,
            draft_model_dir=options.draft_model,
            head_bytes=head.local_bytes if head is not None else 0,
            features_on_device=head is not None and head.is_local,
            max_batch=options.max_batch,
            max_draft_tokens=max_draft_tokens,
            max_context_tokens=options.max_context_tokens,
            step_tokens=options.step_tokens,
            threads=options.threads,
            progress=progress,
            packed_dir=packed_dir(options),
            least_step_s=options.bench_step_ms / 1e3,
            parallel=parallel,
        ),
    )


def packed_dir(options: EngineSettings) -> Path | None:
    """The directory of packed weights; None: they are not shared."""
    if options.packed_dir == _OFF:
        return None
    return Path(options.packed_dir) if options.packed_dir else options.run_dir / _PACKED


def _fake(options: EngineSettings) -> Engine:
    import time

    from libs.engine.core.fake import build_fake_engine
    from libs.engine.model_spec.config_json import read_config_json
    from libs.engine.model_spec.config_section import ConfigSection
    from libs.engine.model_spec.known_keys import TEXT_KEYS

    # With the vocabulary of the model it stands in for, the router's requests fit it.
    limits: dict[str, Any] = {}
    if options.model is not None:
        with unusable_models(options):
            raw = read_config_json(options.model, "model")
            text = ConfigSection(raw.get("text_config") or raw, TEXT_KEYS)
            limits["vocab_size"] = text.integer("vocab_size")
    if options.max_context_tokens is not None:
        limits["max_context_tokens"] = options.max_context_tokens
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
        **limits,
    )
