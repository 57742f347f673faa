"""How the weights of a checkpoint are quantised, from its `quantization_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libs.engine.model_spec.config_section import ConfigSection, KeyTable
from libs.engine.model_spec.known_keys import COMPRESSED_TENSORS_KEYS, FP8_KEYS, GROUP_KEYS, INT4_KEYS
from slipstream.errors import InvalidArgument

_METHODS: dict[str, KeyTable] = {"compressed-tensors": COMPRESSED_TENSORS_KEYS, "fp8": FP8_KEYS}


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """compressed-tensors pack-quantized: symmetric INT4, one scale for `group_size` input features."""

    group_size: int


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """DeepSeek-V3: e4m3 weights, one scale (`weight_scale_inv`) for a block of rows x cols."""

    rows: int
    cols: int


Quantization = Int4Groups | Fp8Blocks


def parse_quantization(raw: Any, path: str) -> Quantization:
    """Parse the section at `path`. Raises InvalidArgument naming the key that is not supported."""
    name = path.rstrip(".")
    if not isinstance(raw, dict):
        raise InvalidArgument(name, f"not a JSON object: {raw!r}")
    method = raw.get("quant_method")
    table = _METHODS.get(method) if isinstance(method, str) else None
    if table is None:
        raise InvalidArgument(
            f"{path}quant_method",
            f"{method!r} is not supported; supported: {' or '.join(map(repr, _METHODS))}",
        )
    section = ConfigSection(raw, table, path)
    return _int4_groups(section) if method == "compressed-tensors" else _fp8_blocks(section)


def _int4_groups(section: ConfigSection) -> Int4Groups:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise section.refusal("config_groups", f"expected an object with at least one group, got {groups!r}")
    if section.get("format") is None:
        raise section.refusal("format", "missing; supported: 'pack-quantized'")
    found: dict[int, str] = {}
    for name, raw in groups.items():
        group = ConfigSection(raw, GROUP_KEYS, f"{section.path}config_groups.{name}.")
        weights = ConfigSection(group.get("weights"), INT4_KEYS, f"{group.path}weights.")
        for key in ("num_bits", "type", "strategy"):
            if weights.get(key) is None:
                raise weights.refusal(key, f"missing; supported: {INT4_KEYS.fixed[key][0][0]!r}")
        found[weights.integer("group_size")] = f"{weights.path}group_size"
    if len(found) > 1:
        size, field = list(found.items())[-1]
        raise InvalidArgument(
            field, f"{size} differs from {next(iter(found))} of another group; one size is supported"
        )
    return Int4Groups(next(iter(found)))


def _fp8_blocks(section: ConfigSection) -> Fp8Blocks:
    size = section.get("weight_block_size")
    if not (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and 1 <= n <= 65536 for n in size)
    ):
        raise section.refusal(
            "weight_block_size",
            f"expected two integers from 1 to 65536, got {size!r}; one scale per block is supported",
        )
    return Fp8Blocks(*size)
