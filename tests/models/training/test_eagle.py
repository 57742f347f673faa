"""Unrolled training, replay and the serving drafter compute the same drafts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.text.special_tokens import IM_END
from libs.text.tokenizer import Tokenizer
from models.acceptance import accepted_lengths
from models.engine_run import generate
from models.helpdesk.dialogues import generate_dialogues
from models.networks.eagle_network import TrainableEagleHead
from models.networks.export import load_head, load_network, write_head, write_model
from models.networks.network import Network
from models.settings import HELD_OUT_SEED, TrainingSettings, quick_settings
from models.train import make_network, make_tokenizer
from models.training.batches import Example, encode_many
from models.training.eagle_train import drafting_rows, make_head, target_view, unrolled_loss
from models.turns import dialogue_turns


class Shipped(NamedTuple):
    """A tiny exported model and head, with the tensors of their files."""

    base_dir: Path
    head_dir: Path
    tokenizer: Tokenizer
    target: Network
    head: TrainableEagleHead
    settings: TrainingSettings


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    settings = quick_settings()
    root = tmp_path_factory.mktemp("shipped")
    base_dir, head_dir = root / "base", root / "head"
    tokenizer = make_tokenizer(settings, base_dir)
    write_model(make_network(settings), tokenizer, base_dir)
    target = load_network(base_dir)
    write_head(make_head(target, settings.eagle, 3), tokenizer, head_dir)
    return Shipped(base_dir, head_dir, tokenizer, target, load_head(head_dir), settings)


def test_drafting_rows_lie_in_one_span() -> None:
    example = Example(list(range(30)), [(5, 9), (12, 13), (20, 28)])
    rows, ends = drafting_rows(example, 0, 30)
    # Row i has the input token i + 1 of a span and drafts i + 2, which must still be in the span.
    assert rows.tolist() == [4, 5, 6, 19, 20, 21, 22, 23, 24, 25]
    assert ends.tolist() == [9] * 3 + [28] * 7
    rows, ends = drafting_rows(example, 6, 25)
    assert rows.tolist() == [0, 13, 14, 15, 16]
    assert ends.tolist() == [3, 19, 19, 19, 19]


def test_unrolling_equals_one_draft_at_a_time(shipped: Shipped) -> None:
    """Drafts of one row do not depend on which other rows draft, nor on later tokens of the text."""
    ids = torch.tensor(encode_many(shipped.tokenizer, HELD_OUT_SEED, 1)[0].token_ids[:120])
    features, _ = target_view(shipped.target, ids, shipped.settings.eagle.output_layer_ids)
    embedded = F.embedding(ids, shipped.target.embed_tokens.weight)
    with torch.no_grad():
        together = shipped.head.unroll(features[:100], embedded, torch.tensor([40, 70, 99]), 3)
        alone = shipped.head.unroll(features[:71], embedded[:75], torch.tensor([70]), 3)
    for step in range(3):
        torch.testing.assert_close(alone[step][0], together[step][1], atol=1e-4, rtol=1e-4)


def test_replay_equals_the_engine_with_its_drafter(shipped: Shipped) -> None:
    options = EngineOptions(weight_dtype="float32", kv_dtype="float32", draft_model_dir=shipped.head_dir)
    engine = build_engine(shipped.base_dir, options)
    dialogue = next(iter(generate_dialogues(HELD_OUT_SEED, 1)))
    prompt = dialogue_turns(shipped.tokenizer, dialogue)[0].prompt_ids
    stop = shipped.tokenizer.special_id(IM_END)
    drafter = build_drafter(shipped.head_dir, shipped.base_dir)
    drafted = generate(
        engine, [prompt], stop_token_id=stop, max_tokens=48, drafter=drafter, share_prefixes=False
    )[0]
    plain = generate(engine, [prompt], stop_token_id=stop, max_tokens=48)[0]
    assert drafted.token_ids == plain.token_ids
    ids = [*prompt, *plain.token_ids]
    example = Example(ids, [(len(prompt), len(ids))])
    layer_ids = shipped.settings.eagle.output_layer_ids
    features, hidden = target_view(shipped.target, torch.tensor(ids), layer_ids)
    logits = shipped.target.logits(hidden)
    replayed = accepted_lengths(shipped.head, shipped.target, example, features, logits, drafts=3)
    assert sum(replayed) == len(plain.token_ids) - 1
    assert drafted.step_lengths == replayed


def test_loss_reaches_every_part_of_the_head(shipped: Shipped) -> None:
    head = make_head(shipped.target, shipped.settings.eagle, 3)
    example = encode_many(shipped.tokenizer, HELD_OUT_SEED, 1)[0]
    loss, rows = unrolled_loss(head, shipped.target, (example, 0), shipped.settings.eagle)
    assert rows > 10
    loss.backward()  # type: ignore[no-untyped-call]
    for name, p in head.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.abs().sum() > 0), name
