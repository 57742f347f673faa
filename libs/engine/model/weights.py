"""The weights of the text model, read from a checkpoint and packed tensor by tensor for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from libs.engine.kernels.interface import Kernels, MlpMatrices, Packed
from libs.engine.kernels.layer import Attention, Layer
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.shards import CheckpointError
from libs.engine.model.tensor_rows import copy_finite_into
from libs.engine.model.widened_rows import held_dtype
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix
from libs.engine.model_spec.stacked_rows import StackedRows
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix, StoredRows
from libs.engine.packed.weight_store import PackableMatrix, PrivateWeights, WeightStore

WeightDtype = Literal["auto", "float32", "bfloat16"]
ComputeDtype = Literal["auto", "avx512_bf16", "float32"]
_TIED_ROWS = 1024  # of the head that are compared with the embedding at once


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Packed


class WeightLoader:
    """Loads one checkpoint, whose tensors `check_inventory` has compared with the configuration."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        kernels: Kernels,
        dtype: WeightDtype = "auto",
        store: WeightStore | None = None,
    ) -> None:
        """`store`: where the weights are; None = in the memory of this process.

        Names in the store, and their order, are a format: a change needs another PACKING_VERSION.
        """
        self._checkpoint = checkpoint
        self._store = store or PrivateWeights(kernels.device)
        self._config = config
        self._kernels = kernels
        self._dtype = dtype
        self._prefix = checkpoint.text_prefix()

    def load(self) -> ModelWeights:
        c = self._config
        embedding = self._store.tensor("embed_tokens", partial(self._embedding, slice(0, c.vocab_size)))
        layers = tuple(self._layer(index) for index in range(c.n_layers))
        norm, head = (
            self._norm("norm", c.hidden_size),
            self._kernels.pack(self._store.matrix("lm_head", partial(self._head, embedding))),
        )
        self._checkpoint.finish()
        return ModelWeights(self._kernels.place(embedding), layers, norm, head)

    def _embedding(self, span: slice) -> torch.Tensor:
        """Rows of the embedding, which are there when the checkpoint is finished."""
        rows = self._embedding_rows()
        found = self._store.empty(span.stop - span.start, rows.n_cols, dtype=rows.dtype)
        rows.cut(span, None).stream(copy_finite_into(found), 1)
        return found

    def _embedding_rows(self) -> StoredRows:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._checkpoint.rows(f"{self._prefix}embed_tokens.weight", shape, self._dtype_of)

    def _dtype_of(self, stored: torch.dtype) -> torch.dtype:
        """FP8 weights are held in bf16 where the model's dtype is bf16, as DeepSeek converts them."""
        if self._dtype != "auto":
            wanted: torch.dtype = getattr(torch, self._dtype)
            return wanted
        if stored == torch.float8_e4m3fn and self._config.dtype == "bfloat16":
            return torch.bfloat16
        return held_dtype(stored)

    def _head(self, embedding: torch.Tensor) -> Matrix:
        c = self._config
        name = self._checkpoint.head_name()
        shape = (c.vocab_size, c.hidden_size)
        if name is None:
            self._checkpoint.finish()
            return DenseMatrix(embedding)
        rows = self._checkpoint.rows(name, shape, self._dtype_of)
        if not c.tie_word_embeddings:
            return StoredMatrix(rows, c.hidden_size)
        self._checkpoint.finish()
        self._check_tied(name, rows, lambda span: embedding[span].cpu())
        return DenseMatrix(embedding)

    def _check_tied(self, name: str, head: StoredRows, embedding: Callable[[slice], torch.Tensor]) -> None:
        for first in range(0, self._config.vocab_size, _TIED_ROWS):
            span = slice(first, first + _TIED_ROWS)
            if not torch.equal(head.cut(span, None).read(), embedding(span)):
                raise CheckpointError(
                    name, "differs from the embedding, to which tie_word_embeddings ties it"
                )

    def _layer(self, index: int) -> Layer:
        c = self._config
        name = f"layers.{index}"
        return Layer(
            input_norm=self._norm(f"{name}.input_layernorm", c.hidden_size),
            attention=self._attention(f"{name}.self_attn"),
            post_norm=self._norm(f"{name}.post_attention_layernorm", c.hidden_size),
            mlp=self._moe(f"{name}.mlp") if c.is_moe(index) else self._dense_mlp(f"{name}.mlp"),
        )

    def _attention(self, name: str) -> Attention:
        c = self._config
        q_norm = q_b = None
        if c.q_lora_rank is not None:
            q_norm = self._norm(f"{name}.q_a_layernorm", c.q_lora_rank)
            q_b = self._kernels.pack(self._stored(f"{name}.q_b_proj", self._q_rows, c.q_lora_rank))
        kv_b_rows = c.n_heads * (c.qk_nope_head_dim + c.v_head_dim)
        kv_b = self._store.heads(
            f"{name}.kv_b_proj",
            partial(self._unpacked, f"{name}.kv_b_proj", kv_b_rows, c.kv_lora_rank),
            c.qk_nope_head_dim,
            c.v_head_dim,
        )
        return Attention(
            a_proj=self._kernels.pack(self._store.matrix(f"{name}.a_proj", partial(self._a_proj, name))),
            q_norm=q_norm,
            q_b=q_b,
            kv_norm=self._norm(f"{name}.kv_a_layernorm", c.kv_lora_rank),
            kv_b=self._kernels.pack_kv_b(kv_b, c),
            o_proj=self._kernels.pack(
                self._stored(f"{name}.o_proj", c.hidden_size, c.n_heads * c.v_head_dim)
            ),
        )

    @property
    def _q_rows(self) -> int:
        return self._config.n_heads * self._config.qk_head_dim

    def _a_proj(self, name: str) -> Matrix:
        """The reader of the residual stream: the first projection of the queries above that of the latent."""
        c = self._config
        if c.q_lora_rank is None:
            first = self._unpacked(f"{name}.q_proj", self._q_rows, c.hidden_size)
        else:
            first = self._unpacked(f"{name}.q_a_proj", c.q_lora_rank, c.hidden_size)
        return _stack(first, self._unpacked(f"{name}.kv_a_proj_with_mqa", c.latent_width, c.hidden_size))

    def _dense_mlp(self, name: str) -> Packed:
        return self._kernels.pack_mlp(self._mlp(name, self._config.dense_intermediate_size))

    def _moe(self, name: str) -> Packed:
        c = self._config
        bias = self._floats(f"{name}.gate.e_score_correction_bias", c.n_routed_experts)
        shared = None
        if c.n_shared_experts:
            shared = self._mlp(f"{name}.shared_experts", c.moe_intermediate_size * c.n_shared_experts)
        return self._kernels.pack_moe(
            self._stored(f"{name}.gate", c.n_routed_experts, c.hidden_size),
            bias,
            self._experts(name),
            shared,
            c,
        )

    def _experts(self, name: str) -> Iterator[MlpMatrices | None]:
        for expert in range(self._config.n_routed_experts):
            yield self._mlp(f"{name}.experts.{expert}", self._config.moe_intermediate_size)

    def _mlp(self, name: str, intermediate_size: int) -> MlpMatrices:
        hidden_size = self._config.hidden_size
        return (
            self._stored(f"{name}.gate_proj", intermediate_size, hidden_size),
            self._stored(f"{name}.up_proj", intermediate_size, hidden_size),
            self._stored(f"{name}.down_proj", hidden_size, intermediate_size),
        )

    def _stored(self, name: str, rows: int, cols: int) -> PackableMatrix:
        return self._store.matrix(name, partial(self._matrix, name, rows, cols))

    def _matrix(self, name: str, rows: int, cols: int) -> Matrix:
        return self._checkpoint.matrix(
            f"{self._prefix}{name}", rows, cols, self._config.quantization, self._dtype_of
        )

    def _unpacked(self, name: str, rows: int, cols: int) -> DenseMatrix | StoredMatrix:
        """A matrix to be rearranged before packing, dequantised if it is INT4."""
        matrix = self._matrix(name, rows, cols)
        if isinstance(matrix, StoredMatrix) and matrix.scale is None:
            return matrix
        return DenseMatrix(matrix.dequantised())

    def _norm(self, name: str, width: int) -> torch.Tensor:
        return self._kernels.place(self._floats(f"{name}.weight", width))

    def _floats(self, name: str, width: int) -> torch.Tensor:
        return self._store.tensor(
            name, lambda: self._checkpoint.dense(f"{self._prefix}{name}", (width,)).float()
        )


def _stack(upper: DenseMatrix | StoredMatrix, lower: DenseMatrix | StoredMatrix) -> Matrix:
    match upper, lower:
        case StoredMatrix(values=above), StoredMatrix(values=below) if above.dtype == below.dtype:
            return StoredMatrix(StackedRows(above, below), upper.cols)
    return DenseMatrix(torch.cat((_weight(upper), _weight(lower))))


def _weight(matrix: DenseMatrix | StoredMatrix) -> torch.Tensor:
    return matrix.weight if isinstance(matrix, DenseMatrix) else matrix.values.read()
