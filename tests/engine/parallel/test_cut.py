"""The parts of the weights: together they are the whole, and INT4 stays INT4 where its groups allow."""

from __future__ import annotations

import pytest
import torch

from libs.engine.model_spec.config import parse_config
from libs.engine.model_spec.matrix import DenseMatrix, Int4Matrix
from libs.engine.model_spec.stored_matrix import Matrix
from libs.engine.parallel.cut import MatrixCut, local_experts, matrix_cut, vocabulary_slice
from libs.engine.parallel.sizes import ParallelSizes, RankPlace
from tests.support.quantize import pack_int4
from tests.support.random_checkpoint import TINY_CONFIG

CONFIG = parse_config(TINY_CONFIG)


def matrices() -> dict[str, Matrix]:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    return {"dense": DenseMatrix(weight), "int4": pack_int4(weight, 32, torch.bfloat16)}


@pytest.mark.parametrize("form", ["dense", "int4"])
@pytest.mark.parametrize("axis", ["rows", "cols"])
@pytest.mark.parametrize(("parts", "unit"), [(1, 1), (2, 32), (3, 32), (4, 32), (5, 1), (7, 10)])
def test_the_parts_join_to_the_whole(form: str, axis: str, parts: int, unit: int) -> None:
    matrix = matrices()[form]
    cuts = [MatrixCut(axis, part, parts, unit) for part in range(parts)]  # type: ignore[arg-type]
    pieces = [cut.apply(matrix) for cut in cuts]
    whole = torch.cat([piece.dequantised() for piece in pieces], dim=0 if axis == "rows" else 1)
    assert torch.equal(whole, matrix.dequantised())
    if form == "int4" and (axis == "rows" or unit == 32):
        assert all(isinstance(piece, Int4Matrix) for piece in pieces)


@pytest.mark.parametrize(
    "sizes",
    [ParallelSizes(2, 1, 2, 2), ParallelSizes(4), ParallelSizes(1, 2, 3, 3), ParallelSizes(tp=2, kv=2, ep=2)],
)
def test_the_ranks_of_a_stage_hold_each_weight_once(sizes: ParallelSizes) -> None:
    places = [RankPlace(rank, sizes) for rank in range(sizes.stage_ranks)]
    for name in ("mlp.gate_proj", "mlp.shared_experts.down_proj"):
        cuts = [matrix_cut(name, place, CONFIG) for place in places]
        assert {cut.part for cut in cuts if cut} == set(range(sizes.stage_ranks))
    held = [
        (expert, cut.part)
        for place in places
        for expert in local_experts(place, CONFIG)
        if (cut := matrix_cut(f"mlp.experts.{expert}.up_proj", place, CONFIG))
    ]
    assert sorted(held) == [(e, p) for e in range(CONFIG.n_routed_experts) for p in range(sizes.expert_ranks)]
    ids = [i for place in places for i in range(CONFIG.vocab_size)[vocabulary_slice(place, CONFIG)]]
    assert ids == list(range(CONFIG.vocab_size))


@pytest.mark.parametrize(
    "name", ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate", "input_layernorm"]
)
def test_latents_and_routing_are_the_same_everywhere(name: str) -> None:
    assert matrix_cut(name, RankPlace(1, ParallelSizes(tp=2)), CONFIG) is None
