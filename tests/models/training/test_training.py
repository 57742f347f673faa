"""Training steps: load balance, rounding, masks, schedule, and resuming after a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from libs.text.tokenizer import Tokenizer
from models.networks.network import Network
from models.settings import TrainingSettings, quick_settings, step_lr_scale
from models.train import make_network, make_tokenizer
from models.training.base_train import balance_experts, build_optimizer, language_loss, train_base
from models.training.batches import TrainingBatch, dialogue_batches, long_batch
from models.training.optimizer import orthogonalize
from models.training.run_state import load_run


@pytest.fixture(scope="module")
def settings() -> TrainingSettings:
    quick = quick_settings()
    architecture = replace(quick.base.architecture, num_hidden_layers=2)
    base = replace(
        quick.base,
        architecture=architecture,
        steps=6,
        step_tokens=768,
        long_every=4,
        long_max_tokens=512,
        quantize_from_step=3,
        validation_dialogues=2,
        validate_every=6,
        checkpoint_every=3,
    )
    return replace(quick, base=base, tokenizer=replace(quick.tokenizer, dialogues=60))


@pytest.fixture(scope="module")
def tokenizer(settings: TrainingSettings, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(settings, tmp_path_factory.mktemp("tokenizer"))


def test_an_interrupted_training_gives_the_same_weights(
    settings: TrainingSettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def run(path: Path, steps: int) -> dict[str, torch.Tensor]:
        # The schedule depends on `steps`: a constant rate makes the two runs comparable.
        s = replace(settings.base, steps=steps, decay_steps=1, warmup_steps=1)
        train_base(make_network(settings), tokenizer, s, settings.seed, path, lambda line: None)
        return load_run(path)

    whole = run(tmp_path / "whole.safetensors", 6)
    run(tmp_path / "parts.safetensors", 3)
    parts = run(tmp_path / "parts.safetensors", 6)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=2e-3, rtol=2e-2, msg=name)


def test_a_single_batch_can_be_memorised(settings: TrainingSettings, tokenizer: Tokenizer) -> None:
    network = make_network(settings).train()
    optimizer = build_optimizer(network, settings.base)
    batch = next(dialogue_batches(tokenizer, 1, step_tokens=600))
    first = language_loss(network, batch, 0.05).item()
    for _ in range(40):
        loss = language_loss(network, batch, 0.05)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(1.0)
        balance_experts(network, 0.01)
        if loss.item() < 0.35 * first:
            break
    assert loss.item() < 0.35 * first


def test_padding_does_not_count(settings: TrainingSettings, tokenizer: Tokenizer) -> None:
    network = make_network(settings).eval()
    batch = next(dialogue_batches(tokenizer, 1, step_tokens=600))
    row = int(batch.valid.sum(1).argmin())
    n = int(batch.valid[row].sum())
    alone = TrainingBatch(
        batch.token_ids[row : row + 1, :n], batch.generated[row : row + 1, :n], batch.valid[row : row + 1, :n]
    )
    padded_ids = torch.cat((alone.token_ids, torch.zeros(1, 9, dtype=torch.int64)), dim=1)
    no = torch.zeros(1, 9, dtype=torch.bool)
    padded = TrainingBatch(padded_ids, torch.cat((alone.generated, no), 1), torch.cat((alone.valid, no), 1))
    with torch.no_grad():
        torch.testing.assert_close(language_loss(network, padded, 0.05), language_loss(network, alone, 0.05))


def test_batches_are_a_function_of_the_seed(tokenizer: Tokenizer) -> None:
    first = next(dialogue_batches(tokenizer, 7, step_tokens=2048))
    again = next(dialogue_batches(tokenizer, 7, step_tokens=2048))
    other = next(dialogue_batches(tokenizer, 8, step_tokens=2048))
    assert torch.equal(first.token_ids, again.token_ids)
    assert first.token_ids.shape != other.token_ids.shape or not torch.equal(first.token_ids, other.token_ids)
    assert first.token_ids.numel() <= 2048
    assert long_batch(tokenizer, 7, 0, max_tokens=900).token_ids.shape == (1, 900)


def test_balance_moves_biases_against_the_load(settings: TrainingSettings) -> None:
    network: Network = make_network(settings)
    moe = network.moe_layers()[0]
    moe.gate.load[:] = torch.tensor([8.0, 0, 1, 1, 1, 1, 1, 3])
    balance_experts(network, 0.1)
    bias = moe.gate.e_score_correction_bias
    assert bias[0] < 0 < bias[1]
    assert not moe.gate.load.any()


def test_orthogonalized_updates_have_singular_values_near_one() -> None:
    update = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    for matrix in (update, update.mT):
        values = torch.linalg.svdvals(orthogonalize(matrix))
        assert values.shape == (3, 24)
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_learning_rate_warms_up_holds_and_falls_to_zero() -> None:
    scale = [step_lr_scale(i, steps=100, warmup_steps=10, decay_steps=20) for i in range(100)]
    assert scale[0] == pytest.approx(0.1)
    assert scale[10:81] == [1.0] * 71
    assert scale[99] == pytest.approx(0.05)
    assert scale[80:] == sorted(scale[80:], reverse=True)
    later = [
        step_lr_scale(i, steps=100, warmup_steps=10, decay_steps=20, decay_from_step=90) for i in range(100)
    ]
    assert later[10:90] == [1.0] * 80
    assert later[90:] == scale[90:]
