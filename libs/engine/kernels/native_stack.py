"""Runs all layers of the decoder in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from libs.engine.kernels.layer import Layer
from libs.engine.kernels.native import NativeKernels, attention_of, slots_of
from libs.engine.kernels.native_types import LAYER, STACK, STEP
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.step.stop_flag import StopFlag


class NativeStack:
    """A stack with bit for bit the results of `PlainStack` over the same kernels."""

    def __init__(
        self, config: ModelConfig, layers: tuple[Layer, ...], kernels: NativeKernels, latent_norm_eps: float
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._weights = layers  # owns the memory that the structs below point into
        self._layers = (LAYER * len(layers))(
            *(_layer(layer, is_moe=config.is_moe(index)) for index, layer in enumerate(layers))
        )
        self._stack = STACK(
            ctypes.addressof(self._layers),
            len(layers),
            config.hidden_size,
            config.rms_norm_eps,
            latent_norm_eps,
        )

    def run(
        self, x: torch.Tensor, plan: BatchPlan, captured: Sequence[int], stop: StopFlag | None = None
    ) -> Mapping[int, torch.Tensor]:
        distinct = list(dict.fromkeys(captured))
        capture_of = np.full(len(self._weights), -1, np.int32)
        capture_of[distinct] = np.arange(len(distinct))
        outputs = x.new_empty(len(distinct), *x.shape)
        step = STEP(
            slots_of(plan, self._config.kv_lora_rank),
            attention_of(plan, plan.absorbed, self._config),
            attention_of(plan, plan.expanded, self._config),
            plan.cache.address,
            capture_of.ctypes.data,
            outputs.data_ptr(),
            x.data_ptr(),
            None if stop is None else stop.address,
        )
        self._kernels.run_stack(ctypes.addressof(self._stack), ctypes.addressof(step))
        return dict(zip(distinct, outputs, strict=True))


def _layer(layer: Layer, *, is_moe: bool) -> LAYER:
    attention = layer.attention
    return LAYER(
        input_norm=layer.input_norm.data_ptr(),
        q_norm=None if attention.q_norm is None else attention.q_norm.data_ptr(),
        kv_norm=attention.kv_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        a_proj=attention.a_proj.address,
        q_b=None if attention.q_b is None else attention.q_b.address,
        uk=attention.kv_b.uk.address,
        uv=attention.kv_b.uv.address,
        o_proj=attention.o_proj.address,
        mlp=None if is_moe else layer.mlp.address,
        moe=layer.mlp.address if is_moe else None,
    )
