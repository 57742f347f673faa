"""A rank of a KV split needs its own KV only: ranks whose memories are separate, as those of devices are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model_spec.kv_share import KvShare
from libs.engine.parallel.group_runner import GroupRunner
from libs.engine.parallel.sizes import parse_sizes
from slipstream.errors import InvalidArgument
from tests.engine.parallel.forked_ranks import forked_group
from tests.engine.parallel.test_group import BATCHES, BLOCK_TOKENS, TOLERANCE
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

OPTIONS = RunnerOptions(
    n_pages=64, block_tokens=BLOCK_TOKENS, threads=1, kv_dtype="float32", compute_dtype="float32"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, RandomCheckpoint(dtype="float32"))
    return directory


@pytest.mark.parametrize("cut", ["kv=2", pytest.param("tp=2,kv=2", marks=pytest.mark.soak)])
def test_ranks_with_separate_memories_hold_and_need_their_slots_only(model_dir: Path, cut: str) -> None:
    one = ModelRunner.load(model_dir, OPTIONS)
    with forked_group(model_dir, OPTIONS, cut, separate_pages=True) as group:
        for batch in BATCHES:
            expected, found = one.forward(batch), group.forward(batch)
            torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
        own = KvShare(0, 2).slots(BLOCK_TOKENS)
        pages = group._model.pages.own.pages
        torch.testing.assert_close(pages, one.cache.pages[:, :, own], rtol=0, atol=TOLERANCE)


def test_a_split_that_pages_do_not_allow_is_refused_before_any_rank_starts(model_dir: Path) -> None:
    with pytest.raises(InvalidArgument, match="kv=3 does not divide the 16 tokens of a KV page"):
        GroupRunner.load(model_dir, OPTIONS, parse_sizes("kv=3"))
