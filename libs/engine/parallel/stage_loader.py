"""Loads what one rank holds of a checkpoint: the layers of its stage, and its cut of each matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from libs.engine.kernels.interface import Kernels, MlpMatrices, Packed
from libs.engine.kernels.layer import Layer
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.weights import WeightDtype, WeightLoader
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix
from libs.engine.parallel.cut import local_experts, matrix_cut, vocabulary_slice
from libs.engine.parallel.sizes import ParallelSizes, RankPlace
from libs.engine.parallel.stages import PartCost, balance_stages

_LAYER_OF_NAME = re.compile(r"layers\.(\d{1,6})\.(.*)")
# The tokens of a decode step by which a stage's time is judged: the more, the more experts a step reads.
_STEP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StageWeights:
    """embedding [rows of the vocabulary's slice, H] of the first stage; norm and head of the last one."""

    layers: tuple[Layer, ...]
    embedding: torch.Tensor | None
    norm: torch.Tensor | None
    head: Packed | None


class StageLoader(WeightLoader):
    """A loader of one rank. It reads the rows that the rank holds, and cuts columns from whole rows."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        kernels: Kernels,
        dtype: WeightDtype,
        *,
        place: RankPlace,
    ) -> None:
        super().__init__(checkpoint, config, kernels, dtype)
        self._place = place
        self._local_experts = local_experts(place, config)

    def load_stage(self, layers: range) -> StageWeights:
        c, place = self._config, self._place
        embedding = norm = head = None
        if place.is_first_stage:
            embedding = self._embedding(vocabulary_slice(place, c))
        loaded = tuple(self._layer(index) for index in layers)
        if place.is_last_stage:
            norm = self._norm("norm", c.hidden_size)
            head = self._kernels.pack(self._head_rows())
        self._checkpoint.finish()
        embedding = None if embedding is None else self._kernels.place(embedding)
        return StageWeights(loaded, embedding, norm, head)

    def _head_rows(self) -> Matrix:
        c, name = self._config, self._checkpoint.head_name()
        rows = embedding = self._embedding_rows()
        if name is not None:
            head = self._checkpoint.rows(name, (c.vocab_size, c.hidden_size), self._dtype_of)
            if c.tie_word_embeddings:
                self._check_tied(name, head, lambda span: embedding.cut(span, None).read())
            rows = head
        return StoredMatrix(rows.cut(vocabulary_slice(self._place, c), None), c.hidden_size)

    def _experts(self, name: str) -> Iterator[MlpMatrices | None]:
        width = self._config.moe_intermediate_size
        for expert in range(self._config.n_routed_experts):
            is_local = expert in self._local_experts
            yield self._mlp(f"{name}.experts.{expert}", width) if is_local else None

    def _matrix(self, name: str, rows: int, cols: int) -> Matrix:
        matrix = super()._matrix(name, rows, cols)
        layer = _LAYER_OF_NAME.match(name)
        cut = matrix_cut(layer[2], self._place, self._config) if layer else None
        return matrix if cut is None else cut.apply(matrix)


def choose_stages(checkpoint: Checkpoint, config: ModelConfig, sizes: ParallelSizes) -> tuple[range, ...]:
    """The layers of each stage, by the sizes of the checkpoint's tensors."""
    prefix, head = checkpoint.text_prefix(), checkpoint.head_name()
    n_bytes, time = ([0.0] * config.n_layers for _ in range(2))
    miss = (1 - config.experts_per_token / config.n_routed_experts) ** _STEP_TOKENS
    for name in checkpoint.names():
        found = _LAYER_OF_NAME.match(name.removeprefix(prefix))
        if found is None or int(found[1]) >= config.n_layers:
            continue
        stored = checkpoint.header(name).stored_bytes
        n_bytes[int(found[1])] += stored
        time[int(found[1])] += stored * (1 - miss) if found[2].startswith("mlp.experts.") else stored
    embedding = checkpoint.header(f"{prefix}embed_tokens.weight").stored_bytes
    head_bytes = embedding if head is None else checkpoint.header(head).stored_bytes
    return balance_stages(
        [PartCost(*cost) for cost in zip(n_bytes, time, strict=True)],
        sizes.pp,
        embedding=PartCost(embedding, 0.0),
        head=PartCost(head_bytes, head_bytes),
    )
