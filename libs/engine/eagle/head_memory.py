"""What a draft head takes of a device's memory: an estimate from its `config.json`. Pure; imports no torch.

`tests/engine/eagle/test_head_memory.py` holds it against the tensors of loaded heads. No device has run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.engine.eagle.block_config import BlockHeadConfig, is_block_head, parse_block_config
from libs.engine.eagle.config import GroupedShape, HeadConfig, LatentShape, parse_head_config
from libs.engine.eagle.head_rows import PADDED_CONTEXTS, context_rows
from libs.engine.model_spec.config_json import read_config_json
from libs.engine.step.types import FEATURE_WINDOW_TOKENS

BF16_BYTES, FP32_BYTES = 2, 4
_NORM_BYTES = 4
_ID_BYTES = 8
_LOGIT_BYTES = 4
_LOGIT_COPIES = 2  # logits and their probabilities
_PASS_BYTES = 32 << 20  # activations beside logits
DRAFTER_CONTEXTS = 1024  # of a drafter's head
# Sequences that decode beyond a batch wait for a step with their contexts.
_CONTEXTS_OF_A_BATCH = 2
# An EAGLE-3 head reads features of so many layers.
_CHAIN_LAYERS = 3


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """What a head takes, and what its target takes for it.

    weight_bytes   of all tensors of the head
    context_bytes  of one context
    pass_bytes     of drafts for the most contexts
    feature_bytes  of the projection that makes its features (`FeatureHead`), in the engine of the target
    """

    weight_bytes: int
    context_bytes: int
    pass_bytes: int
    feature_bytes: int

    def n_bytes(self, max_sequences: int) -> int:
        """The memory of the head with so many contexts."""
        return self.weight_bytes + max_sequences * self.context_bytes + self.pass_bytes


def local_contexts(max_batch: int) -> int:
    """Contexts that the head of a decode worker holds on its device."""
    return _CONTEXTS_OF_A_BATCH * max_batch


def parse_draft_config(raw: Mapping[str, Any]) -> HeadConfig | BlockHeadConfig:
    """Parse the decoded `config.json` of a head of any kind. Raises InvalidArgument naming the key."""
    return parse_block_config(raw) if is_block_head(raw) else parse_head_config(raw)


def read_head_memory(head_dir: Path, *, value_bytes: int = BF16_BYTES) -> HeadMemory:
    """The memory of the head in a directory. Raises InvalidArgument naming a missing or unsupported key."""
    return head_memory(
        parse_draft_config(read_config_json(head_dir, "draft_model_dir")), value_bytes=value_bytes
    )


def head_memory(config: HeadConfig | BlockHeadConfig, *, value_bytes: int = BF16_BYTES) -> HeadMemory:
    """The memory of a head. `value_bytes`: of an activation, and of the weights in matrices."""
    if isinstance(config, BlockHeadConfig):
        weight_bytes, n_layers = _block_bytes(config, value_bytes), len(config.target_layers)
        vocab_size, rows_each, norm_values = config.vocab_size, config.block_size, 0
    else:
        weight_bytes, n_layers = _chain_bytes(config, value_bytes), _CHAIN_LAYERS
        vocab_size, rows_each = config.draft_vocab_size, 1
        norm_values = n_layers * config.hidden_size if config.fc_norm or config.norm_before_fc else 0
    context_bytes = context_rows(FEATURE_WINDOW_TOKENS) * config.kv_shape.row_values * value_bytes
    logits = PADDED_CONTEXTS * rows_each * vocab_size * _LOGIT_BYTES * _LOGIT_COPIES
    return HeadMemory(
        weight_bytes,
        context_bytes,
        # A stack of windows, and its copy with room for drafts: each is about half of the contexts' buffers.
        pass_bytes=PADDED_CONTEXTS * context_bytes + logits + _PASS_BYTES,
        feature_bytes=n_layers * config.hidden_size**2 * value_bytes + norm_values * _NORM_BYTES,
    )


def _chain_bytes(c: HeadConfig, value_bytes: int) -> int:
    shape, inputs, hidden = c.attention, 2 * c.hidden_size, c.hidden_size
    values = (c.vocab_size + c.draft_vocab_size + 3 * c.intermediate_size) * hidden
    norms = 4 * hidden
    if isinstance(shape, GroupedShape):
        values += (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim * inputs
        values += shape.n_heads * shape.head_dim * hidden
    else:
        values += _latent_values(shape, inputs) + shape.n_heads * shape.v_head_dim * hidden
        norms += (shape.q_lora_rank or 0) + shape.kv_lora_rank
    return values * value_bytes + norms * _NORM_BYTES + c.draft_vocab_size * _ID_BYTES


def _latent_values(shape: LatentShape, inputs: int) -> int:
    q_rows = shape.n_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    rank = shape.q_lora_rank
    q = q_rows * inputs if rank is None else rank * (inputs + q_rows)
    kv = (shape.kv_lora_rank + shape.qk_rope_head_dim) * inputs
    return q + kv + shape.n_heads * (shape.qk_nope_head_dim + shape.v_head_dim) * shape.kv_lora_rank


def _block_bytes(c: BlockHeadConfig, value_bytes: int) -> int:
    q_rows, kv_rows, hidden = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size
    layer = (2 * q_rows + 2 * kv_rows + 3 * c.intermediate_size) * hidden
    norms = 2 * hidden + c.n_layers * 2 * (hidden + c.head_dim)
    return (2 * c.vocab_size * hidden + c.n_layers * layer) * value_bytes + norms * _NORM_BYTES
