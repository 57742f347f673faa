"""Draft heads in a plan: their bytes by their tensors, on the card of rank 0 and on no other one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from libs.engine.graphs.buckets import BucketLimits
from libs.engine.graphs.step_memory import estimate_step_memory
from libs.planner.cards import parse_cards
from libs.planner.cuts import Cut
from libs.planner.decode_room import DecodeStepRoom, DraftHeadRoom, read_draft_head
from libs.planner.fit import CardMemory, fit_memory
from libs.planner.plan import make_plan
from slipstream.errors import InvalidArgument
from tests.planner.shapes import KIMI_HEAD, kimi

H, VOCABULARY, INNER, HEADS = 7168, 163_840, 18_432, 64

LLAMA_HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": 32_000,
    "fc_norm": True,
}
BLOCK_HEAD: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 5,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 163_838, "target_layer_ids": [1, 12, 30, 45, 58]},
}

MLP = [(INNER, H), (INNER, H), (H, INNER)]
# Tensors of matrices without the embedding, by the published layouts; then values of norms, and token ids.
LATENT_ATTENTION = [
    (1536, 2 * H),
    (HEADS * (128 + 64), 1536),
    (512 + 64, 2 * H),
    (HEADS * (128 + 128), 512),
    (H, HEADS * 128),
]
GROUPED_ATTENTION = [(HEADS * 128, 2 * H), (8 * 128, 2 * H), (8 * 128, 2 * H), (H, HEADS * 128)]
BLOCK_LAYER = [(HEADS * 128, H), (8 * 128, H), (8 * 128, H), (H, HEADS * 128), *MLP]
KINDS: dict[str, tuple[dict[str, Any], list[tuple[int, int]], int, int]] = {
    "MLA": (KIMI_HEAD, [*LATENT_ATTENTION, *MLP, (VOCABULARY, H)], 4 * H + 1536 + 512, VOCABULARY),
    "grouped": (LLAMA_HEAD, [*GROUPED_ATTENTION, *MLP, (32_000, H)], 4 * H, 32_000),
    "block": (BLOCK_HEAD, [*5 * BLOCK_LAYER, (VOCABULARY, H)], 2 * H + 5 * 2 * (H + 128), 0),
}
FEATURES = {
    "MLA": H * 3 * H * 2,
    "grouped": H * 3 * H * 2 + 3 * H * 4,  # with its norms
    "block": H * 5 * H * 2,
}
# Numbers of a token's keys and values in a context.
ROW_VALUES = {"MLA": 512 + 64, "grouped": 2 * 8 * 128, "block": 5 * 2 * 8 * 128}
CONTEXT_ROWS = 2 * 512 + 17  # two windows, and a block of drafts


def values(shapes: list[tuple[int, int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def head_of(tmp_path: Path, kind: str, *, is_local: bool = True, max_batch: int = 64) -> DraftHeadRoom:
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind][0]))
    return read_draft_head(tmp_path, kimi(), is_local=is_local, max_batch=max_batch)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_head_are_those_of_its_tensors_and_contexts(tmp_path: Path, kind: str) -> None:
    """In bf16, with an embedding beside the model's; norms in fp32, ids of eight bytes."""
    _, matrices, norms, ids = KINDS[kind]
    local = head_of(tmp_path, kind, max_batch=48)
    weights = 2 * (values(matrices) + VOCABULARY * H) + 4 * norms + 8 * ids
    contexts = 2 * 48 * CONTEXT_ROWS * ROW_VALUES[kind] * 2
    assert local.name == tmp_path.name
    assert local.memory.weight_bytes == weights
    assert local.memory.feature_bytes == FEATURES[kind]
    assert local.head_bytes == weights + contexts + local.memory.pass_bytes
    assert local.card_bytes == local.head_bytes + FEATURES[kind]
    far = head_of(tmp_path, kind, is_local=False)
    assert far.card_bytes == FEATURES[kind]
    more = (1024 - 96) * CONTEXT_ROWS * ROW_VALUES[kind] * 2
    assert far.head_bytes == local.head_bytes + more


def test_the_published_head_of_kimi_has_its_size_on_disk(tmp_path: Path) -> None:
    """nvidia/Kimi-K2.5-Thinking-Eagle3: 3.68 GB with `fc`; the embedding is the model's."""
    _, matrices, norms, ids = KINDS["MLA"]
    on_disk = 2 * (values(matrices) + H * 3 * H + norms)
    assert on_disk / 1e9 == pytest.approx(3.68, abs=0.005)
    memory = head_of(tmp_path, "MLA").memory
    embedding = VOCABULARY * H * 2
    assert memory.weight_bytes + memory.feature_bytes == on_disk + embedding + 2 * norms + 8 * ids


@pytest.mark.parametrize("cut", [Cut(8), Cut(4, 2), Cut(2, 4), Cut(1, 8), Cut(8, kv=8), Cut(8, replicas=2)])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_head_takes_room_of_the_last_stage_only(tmp_path: Path, cut: Cut, is_local: bool) -> None:
    """The cards of other stages are as full as before; all cards of a stage have as many pages."""
    card, head = parse_cards("8xh200")[1], head_of(tmp_path, "MLA", is_local=is_local)
    n_bytes, overhead = card.visible_bytes, int(2.5 * 2**30)
    whole = fit_memory(kimi(), cut, CardMemory(n_bytes, overhead))
    with_head = fit_memory(kimi(), cut, CardMemory(n_bytes, overhead, draft_head_bytes=head.card_bytes))
    assert whole.group_free_bytes - with_head.group_free_bytes == head.card_bytes
    rooms = [n_bytes - overhead - stage.card_bytes(cut) for stage in whole.stages]
    rooms[-1] -= head.card_bytes
    assert with_head.card_free_bytes == min(rooms)
    assert with_head.card_weights_bytes == whole.card_weights_bytes
    tokens = [room * cut.kv // stage.kv_token_bytes for room, stage in zip(rooms, whole.stages, strict=True)]
    assert with_head.kv_tokens == min(tokens) <= whole.kv_tokens


@pytest.mark.parametrize("has_features", [True, False])
def test_decode_steps_have_room_for_a_row_more_than_drafts_and_pages_of_a_context(has_features: bool) -> None:
    model, room = kimi(), DecodeStepRoom(32, 5, has_features, block_tokens=16)
    most = model.max_context_tokens
    for stated, context_tokens in ((1000, 1000), (None, most), (2 * most, most)):
        expected = estimate_step_memory(
            BucketLimits(32, 6, has_features),
            vocab_size=VOCABULARY,
            feature_width=H if has_features else 0,
            n_blocks=-(-context_tokens // 16),
        )
        assert room.n_bytes(model, stated) == expected.n_bytes


def test_a_head_that_fits_no_card_is_in_the_refusal(tmp_path: Path) -> None:
    """Kimi-K2.5 alone leaves a card of eight H100 less than a local head takes."""
    head = head_of(tmp_path, "block", max_batch=1024)
    n_cards, card = parse_cards("8xh100")
    assert make_plan(kimi(), n_cards, card).chosen.capacity is not None
    size = f"the last stage also has {head.card_bytes / 2**30:.2f} GiB of the draft head"
    with pytest.raises(InvalidArgument, match=f"{size}.*; it fits 32"):
        make_plan(kimi(), n_cards, card, draft_head=head)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"hidden_size": 4096},
            "--draft-model: hidden and vocabulary size 4096, 163840 are not the model's 7168, 163840",
        ),
        (
            {"vocab_size": 163_839, "draft_vocab_size": 8},
            "--draft-model: hidden and vocabulary size 7168, 16",
        ),
        ({"architectures": ["MedusaModel"]}, "--draft-model: .*/config.json: model_type: 'kimi_k2' is not"),
        ({"kv_lora_rank": None}, "--draft-model: .*/config.json: kv_lora_rank"),
    ],
)
def test_a_head_of_another_model_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**KIMI_HEAD, **changes}))
    with pytest.raises(InvalidArgument, match=named):
        read_draft_head(tmp_path, kimi(), is_local=True, max_batch=64)
