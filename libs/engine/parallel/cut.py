"""Which part of each weight a rank holds, by the tensor's name, and the cut of a matrix. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix, Int4Matrix
from libs.engine.model_spec.quantization import Int4Groups
from libs.engine.model_spec.stored_matrix import Matrix, StoredMatrix
from libs.engine.parallel.sizes import RankPlace, even_slice

_NIBBLES = 8  # of a word of packed INT4


@dataclass(frozen=True, slots=True)
class MatrixCut:
    """Part `part` of `parts` of a matrix's rows (output features) or columns; cut at multiples of `unit`."""

    axis: Literal["rows", "cols"]
    part: int
    parts: int
    unit: int = 1

    def apply(self, matrix: Matrix) -> Matrix:
        """The part. INT4 stays packed where the cut falls between its groups."""
        if self.parts == 1:
            return matrix
        total = matrix.rows if self.axis == "rows" else matrix.cols
        span = even_slice(total, self.part, self.parts, unit=self.unit)
        return _rows(matrix, span) if self.axis == "rows" else _cols(matrix, span)


def matrix_cut(name: str, place: RankPlace, config: ModelConfig) -> MatrixCut | None:
    """The cut of the Linear `name` below its layer, such as "mlp.gate_proj"; None where each rank has all."""
    unit = _inner_unit(config)
    stage = (place.index, place.sizes.stage_ranks, unit)
    expert = (place.inner_part, place.sizes.expert_ranks, unit)
    heads = (place.head_part, place.sizes.tp)
    output = (place.output_part, place.sizes.attention_ranks)
    rules: list[tuple[str, Callable[[], MatrixCut]]] = [
        (r"self_attn\.q(_b)?_proj", lambda: MatrixCut("rows", *heads, config.qk_head_dim)),
        (
            r"self_attn\.kv_b_proj",
            lambda: MatrixCut("rows", *heads, config.qk_nope_head_dim + config.v_head_dim),
        ),
        (r"self_attn\.o_proj", lambda: MatrixCut("cols", *output, config.v_head_dim)),
        (r"mlp\.experts\.\d+\.(gate|up)_proj", lambda: MatrixCut("rows", *expert)),
        (r"mlp\.experts\.\d+\.down_proj", lambda: MatrixCut("cols", *expert)),
        (r"mlp\.(shared_experts\.)?(gate|up)_proj", lambda: MatrixCut("rows", *stage)),
        (r"mlp\.(shared_experts\.)?down_proj", lambda: MatrixCut("cols", *stage)),
    ]
    return next((rule() for pattern, rule in rules if re.fullmatch(pattern, name)), None)


def local_experts(place: RankPlace, config: ModelConfig) -> range:
    """The routed experts of which the rank holds a part."""
    span = even_slice(config.n_routed_experts, place.expert_part, place.sizes.ep)
    return range(span.start, span.stop)


def vocabulary_slice(place: RankPlace, config: ModelConfig) -> slice:
    """The rows of embedding and head that the rank holds."""
    return even_slice(config.vocab_size, place.index, place.sizes.stage_ranks)


def _inner_unit(config: ModelConfig) -> int:
    """Where gate, up and down are cut: between groups of INT4, so that no weight is unpacked."""
    quantization = config.quantization
    return math.lcm(_NIBBLES, quantization.group_size) if isinstance(quantization, Int4Groups) else 1


def _rows(matrix: Matrix, span: slice) -> Matrix:
    if isinstance(matrix, StoredMatrix):
        return matrix.cut_rows(span)
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.weight[span].clone())
    return Int4Matrix(matrix.packed[span].clone(), matrix.scale[span].clone(), matrix.cols, matrix.group)


def _cols(matrix: Matrix, span: slice) -> Matrix:
    if isinstance(matrix, StoredMatrix):
        is_between = matrix.scale is None or _is_between_groups(span, matrix.group, matrix.cols)
        return matrix.cut_cols(span) if is_between else _cols(matrix.read(), span)
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.weight[:, span].clone())
    if not _is_between_groups(span, matrix.group, matrix.cols):
        return DenseMatrix(matrix.dequantised()[:, span].clone())
    words = slice(span.start // _NIBBLES, -(-span.stop // _NIBBLES))
    groups = slice(span.start // matrix.group, span.stop // matrix.group)
    return Int4Matrix(
        matrix.packed[:, words].clone(), matrix.scale[:, groups].clone(), span.stop - span.start, matrix.group
    )


def _is_between_groups(span: slice, group: int, cols: int) -> bool:
    """Whether a cut of columns leaves words and groups of INT4 whole."""
    edge = math.lcm(_NIBBLES, group)
    return not span.start % edge and (not span.stop % edge or span.stop == cols)
