"""The fusion of three layers' outputs into the feature that an EAGLE-3 head reads. The target applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from libs.engine.kernels.interface import Kernels, Packed
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.shards import CheckpointError
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.config_json import read_config_json
from libs.engine.model_spec.matrix import DenseMatrix
from slipstream.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class FeatureHead:
    """fc [H, n x H] over the residual stream after the n `layers`: three for EAGLE-3 (low, mid, high).

    slot_norms  a norm for each layer's output (`fc_norm` of EAGLE-3.1); empty = none
    input_norm  one norm over all three (`norm_before_fc`)
    """

    layers: tuple[int, ...]
    fc: Packed
    slot_norms: tuple[torch.Tensor, ...] = ()
    input_norm: torch.Tensor | None = None
    eps: float = 1e-6

    def fuse(self, outputs: Mapping[int, torch.Tensor], kernels: Kernels) -> torch.Tensor:
        """Outputs [T, H] of `layers` -> features [T, H]."""
        slots = [outputs[layer] for layer in self.layers]
        if self.slot_norms:
            normed = zip(slots, self.slot_norms, strict=True)
            slots = [kernels.rms_norm(slot, norm, self.eps) for slot, norm in normed]
        joined = torch.cat(slots, dim=-1)
        if self.input_norm is not None:
            joined = kernels.rms_norm(joined, self.input_norm, self.eps)
        return kernels.linear(joined, self.fc)


def load_feature_head(head_dir: Path, config: ModelConfig, kernels: Kernels) -> FeatureHead:
    """`fc.weight` of an EAGLE-3 head directory, the norms before it, and the layers that it fuses.

    Raises InvalidArgument, and CheckpointError whose tensor or file is below the head's directory.
    """
    try:
        return _load(head_dir, config, kernels)
    except CheckpointError as error:  # the model has files and tensors of such names, too
        raise CheckpointError(str(head_dir / error.tensor), error.reason) from error


def _load(head_dir: Path, config: ModelConfig, kernels: Kernels) -> FeatureHead:
    raw = read_config_json(head_dir, "draft_model_dir")
    width = config.hidden_size
    layers = _feature_layers(raw, config)
    joined_width = len(layers) * width
    with Checkpoint(head_dir) as checkpoint:

        def tensor(name: str, *shape: int) -> torch.Tensor:
            return checkpoint.dense(name if name in checkpoint else f"model.{name}", shape)

        slots = range(len(layers)) if _flag(raw, "fc_norm") else ()
        joined = _flag(raw, "norm_before_fc")
        return FeatureHead(
            layers,
            kernels.pack(DenseMatrix(tensor("fc.weight", width, joined_width))),
            tuple(kernels.place(tensor(f"fc_norm.{slot}.weight", width).float()) for slot in slots),
            kernels.place(tensor("input_norm.weight", joined_width).float()) if joined else None,
            float(raw.get("rms_norm_eps") or 1e-6),
        )


def _flag(raw: dict[str, Any], key: str) -> bool:
    """A flag at the top or in `eagle_config`; `load_head_config` has checked its type."""
    return bool(raw.get(key) or (raw.get("eagle_config") or {}).get(key))


def default_feature_layers(n_layers: int) -> tuple[int, int, int]:
    """Output indices of the residual-stream inputs of layers {2, n//2, n-3} (EAGLE-3), clamped."""
    low, mid, high = (min(max(index, 0), n_layers - 1) for index in (1, n_layers // 2 - 1, n_layers - 4))
    return low, mid, high


def _feature_layers(raw: dict[str, Any], config: ModelConfig) -> tuple[int, ...]:
    """The stated output indices: those of a block drafter; else at the top or in `eagle_config`, or the
    default ones."""
    block = raw.get("dflash_config")
    if block is not None:
        stated: tuple[int, ...] = tuple(block["target_layer_ids"])
        if max(stated) >= config.n_layers:
            raise InvalidArgument(
                "dflash_config.target_layer_ids", f"expected layers below {config.n_layers}, got {stated!r}"
            )
        return stated
    key, nested = "eagle_aux_hidden_state_layer_ids", raw.get("eagle_config") or {}
    inner = nested.get(key) if isinstance(nested, dict) else None
    field, layers = (key, raw.get(key)) if inner is None else (f"eagle_config.{key}", inner)
    if inner is not None and raw.get(key) not in (None, inner):
        raise InvalidArgument(field, f"{inner!r} contradicts {key} {raw[key]!r} at the top level")
    if layers is None:
        return default_feature_layers(config.n_layers)
    valid = isinstance(layers, list) and len(layers) == 3
    if not valid or not all(type(i) is int and 0 <= i < config.n_layers for i in layers):
        raise InvalidArgument(field, f"expected 3 layers below {config.n_layers}, got {layers!r}")
    return tuple(layers)
