"""The model as the runtime sees it: one `forward` over a batch and the cache it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from libs.engine.batch import Batch, ForwardOutput
from libs.engine.cache import PagedLatentCache
from libs.engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint.

    weight_dtype    dtype the weights are held in; "auto" keeps the checkpoint's own (int4 experts stay int4)
    kv_dtype        dtype of the latent cache; "auto" = bfloat16 when the checkpoint is, else float32
    kernels         "native" = compiled C, "torch" = the reference path, "auto" = native where it can be built
    latent_norm_eps epsilon of the q and kv latent norms; 1e-6 as transformers, None = rms_norm_eps as serving engines
    head_dir        EAGLE-3 head directory whose `fc.weight` fuses the features; None = no features
    """

    n_pages: int = 64
    block_tokens: int = 64
    weight_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    latent_norm_eps: float | None = 1e-6
    head_dir: Path | None = None


class ModelRunner:
    """A loaded model with its cache. Not thread-safe: one thread drives it."""

    config: ModelConfig
    cache: PagedLatentCache
    feature_width: int  # hidden size of the features, 0 without a head
    weights_digest: str  # hex; equal for equal checkpoints
    kernels: Literal["native", "torch"]  # the path in use

    @classmethod
    def load(cls, model_dir: Path, options: RunnerOptions | None = None) -> ModelRunner: ...

    def forward(self, batch: Batch) -> ForwardOutput: ...
