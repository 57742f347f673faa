"""Inconsistent batches are refused with the field's name before any computing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.model_spec.config import parse_config
from libs.engine.model_spec.plan import absorbed_row_limit, long_prompt_rows, plan_batch
from libs.engine.model_spec.rope import Rope
from libs.engine.step.batch import ForwardBatch
from slipstream.errors import InvalidArgument
from tests.engine.model.test_config import K25
from tests.support.random_checkpoint import TINY_CONFIG

CONFIG = parse_config(TINY_CONFIG)
CACHE = PagedLatentCache(CacheShape(8, CONFIG.n_layers, 16, CONFIG.latent_width, "float32"))


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


# Two sequences: the last 3 of 20 tokens, and the last 2 of 2.
GOOD = ForwardBatch(
    token_ids=ints(5, 6, 7, 8, 9),
    positions=ints(17, 18, 19, 0, 1),
    query_start=ints(0, 3, 5),
    context_len=ints(20, 2),
    page_table=ints([3, 1], [6, -1]),
    logit_rows=ints(4, 2),
)


def plan(batch: ForwardBatch) -> Any:
    return plan_batch(batch, CONFIG, Rope(CONFIG), CACHE)


def test_each_row_writes_its_own_slot() -> None:
    planned = plan(GOOD)
    assert planned.page_of_row.tolist() == [1, 1, 1, 6, 6]
    assert planned.offset_of_row.tolist() == [1, 2, 3, 0, 1]
    assert planned.rows_of(1) == slice(3, 5)
    assert planned.absorbed.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", ints()),
        ("token_ids", ints(5, 6, 7, 8, CONFIG.vocab_size)),
        ("token_ids", ints(5, 6, 7, 8, -1)),
        ("query_start", ints(1, 3, 5)),
        ("query_start", ints(0, 3, 4)),
        ("query_start", ints(0, 5, 5)),
        ("positions", ints(17, 18, 19, 1, 2)),
        ("positions", ints(17, 19, 18, 0, 1)),
        ("context_len", ints(20, 1)),
        ("page_table", ints([3, 1])),
        ("page_table", ints([3], [6])),
        ("page_table", ints([3, 8], [6, 0])),
        ("page_table", ints([3, -1], [6, 0])),
        ("logit_rows", ints(5)),
        ("logit_rows", ints(-1)),
    ],
)
def test_inconsistent_batches_are_refused(field: str, value: np.ndarray) -> None:
    blamed = "positions" if field == "context_len" else field
    broken: dict[str, Any] = {field: value}
    with pytest.raises(InvalidArgument) as caught:
        plan(replace(GOOD, **broken))
    assert caught.value.field == f"batch.{blamed}"


def test_a_context_shorter_than_its_rows_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan(replace(GOOD, positions=ints(17, 18, 19, -1, 0), context_len=ints(20, 1)))
    assert caught.value.field == "batch.positions"


def test_the_cheaper_form_of_attention_is_chosen() -> None:
    assert absorbed_row_limit(parse_config(K25)) == 170  # 512 * 256 / (1024 - 256)
    # Latents no wider than keys and values together: absorbed always.
    assert absorbed_row_limit(replace(CONFIG, kv_lora_rank=16)) == np.iinfo(np.int32).max


@pytest.mark.parametrize(
    ("change", "field"),
    [({"n_pages": 0}, "cache"), ({"width": 0}, "cache"), ({"kv_dtype": "int8"}, "kv_dtype")],
)
def test_caches_without_size_or_of_unknown_type_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        PagedLatentCache(replace(CACHE.shape, **change))
    assert caught.value.field == field


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_pages_lie_at_the_addresses_given_to_the_transport(kv_dtype: str) -> None:
    cache = PagedLatentCache(CacheShape(3, 2, 16, 40, kv_dtype))
    assert cache.address % 4096 == 0
    assert cache.page_bytes == 2 * 16 * 40 * (4 if kv_dtype == "float32" else 2)
    assert len(cache.memory) == cache.n_bytes == 3 * cache.page_bytes
    cache.pages[1].fill_(1.0)
    assert not any(cache.memory[: cache.page_bytes])
    assert any(cache.memory[cache.page_bytes : 2 * cache.page_bytes])
    assert not any(cache.memory[2 * cache.page_bytes :])
    assert cache.pages[1].data_ptr() == cache.address + cache.page_bytes


def test_steps_of_long_prompts_are_long_where_expanding_is_expensive() -> None:
    assert long_prompt_rows(parse_config(K25)) == 1639  # 4 * 512 * 256 / 320, rounded up
    assert long_prompt_rows(CONFIG) == 103
