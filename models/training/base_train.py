"""Trains the language model: cross entropy on assistant tokens, with INT4 rounding in later steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.text.tokenizer import Tokenizer
from models.networks.copy_circuit import circuit_lr_factors
from models.networks.network import Network
from models.settings import HELD_OUT_SEED, BaseSettings, step_lr_scale
from models.training.batches import TrainingBatch, collate, dialogue_batches, encode_many, long_batch
from models.training.optimizer import Optimizer
from models.training.run_state import load_run, save_run, with_prefix, without_prefix

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Validation:
    """On held-out dialogues, teacher-forced: nats per assistant token, tokens and whole messages right.

    A message counts when every one of its tokens is the argmax: then greedy decoding writes exactly it.
    """

    loss: float
    token_accuracy: float
    message_accuracy: float


def build_optimizer(network: Network, s: BaseSettings) -> Optimizer:
    """Muon for the matrices inside of the layers, AdamW for embeddings, head, gates and norms.

    The weights of `models/networks/copy_circuit.py` learn slowly: at the full rate, learning the format
    first removes them within a hundred steps (copy accuracy 87 % -> 18 %).
    """
    muon = {
        name
        for name, p in network.layers.named_parameters(prefix="layers")
        if p.ndim >= 2 and not name.endswith("gate.weight")
    }
    return Optimizer(
        network.named_parameters(),
        muon_names=frozenset(muon),
        muon_lr=s.muon_lr,
        muon_momentum=s.muon_momentum,
        adam_lr=s.adam_lr,
        adam_betas=s.adam_betas,
        weight_decay=s.weight_decay,
        lr_factors=circuit_lr_factors(network, s.circuit_lr_factor),
    )


def language_loss(network: Network, batch: TrainingBatch, context_weight: float) -> Tensor:
    """Mean cross entropy of the next token. Tokens of others have weight `context_weight`, padding 0."""
    hidden = network(batch.token_ids).hidden[:, :-1]
    generated, valid = batch.generated[:, 1:], batch.valid[:, 1:]
    weight = generated.float() + context_weight * (valid & ~generated).float()
    rows = weight > 0
    logits = network.logits(hidden[rows])
    losses = F.cross_entropy(logits, batch.token_ids[:, 1:][rows], reduction="none")
    return (losses * weight[rows]).sum() / weight.sum()


@torch.no_grad()
def balance_experts(network: Network, rate: float) -> None:
    """Moves each correction bias against the load of its expert (aux-loss-free balancing)."""
    for moe in network.moe_layers():
        load = moe.gate.load
        moe.gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)
        load.zero_()


def load_imbalance(network: Network) -> float:
    """Largest over mean expert load of the last step, worst layer."""
    loads = [moe.gate.load for moe in network.moe_layers()]
    return max(float(load.max() / load.mean().clamp(min=1)) for load in loads)


@torch.no_grad()
def validate(network: Network, tokenizer: Tokenizer, dialogues: int) -> Validation:
    """Evaluate the network on the first held-out dialogues."""
    network.eval()
    examples = sorted(encode_many(tokenizer, HELD_OUT_SEED, dialogues), key=lambda e: len(e.token_ids))
    loss, right, tokens, whole, messages = 0.0, 0, 0, 0, 0
    for at in range(0, len(examples), 8):
        part = examples[at : at + 8]
        batch = collate(part, pad_id=tokenizer.special_id("[PAD]"), max_tokens=1 << 20)
        logits = network.logits(network(batch.token_ids).hidden[:, :-1])
        targets = batch.token_ids[:, 1:]
        mask = batch.generated[:, 1:]
        loss += float(F.cross_entropy(logits[mask], targets[mask], reduction="sum"))
        correct = logits.argmax(-1) == targets
        right += int(correct[mask].sum())
        tokens += int(mask.sum())
        for row, example in enumerate(part):
            whole += sum(bool(correct[row, start - 1 : end - 1].all()) for start, end in example.spans)
            messages += len(example.spans)
    network.train()
    return Validation(loss / tokens, right / tokens, whole / messages)


def train_base(
    network: Network, tokenizer: Tokenizer, s: BaseSettings, seed: int, path: Path, log: Log
) -> None:
    """Trains to the end, from the checkpoint at `path` if there is one."""
    optimizer = build_optimizer(network, s)
    first = _resume(path, network, optimizer)
    if first:
        log(f"base: goes on from step {first}")
    network.train()
    began, seen = time.monotonic(), 0
    for step, batch in _batches(tokenizer, s, seed):
        if step < first:
            continue
        network.set_quantized(step >= s.quantize_from_step)
        if step >= s.freer_from_step:
            optimizer.set_lr_factors(circuit_lr_factors(network, s.freer_lr_factor))
        scale = step_lr_scale(
            step,
            steps=s.steps,
            warmup_steps=s.warmup_steps,
            decay_steps=s.decay_steps,
            decay_from_step=s.decay_from_step,
        )
        loss = language_loss(network, batch, s.context_loss_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(scale)
        seen += int(batch.valid.sum())
        if step % 10 == 0:
            rate = seen / (time.monotonic() - began)
            imbalance = load_imbalance(network)
            log(
                f"base: step {step}/{s.steps} loss {loss.item():.4f} tokens/s {rate:.0f} load {imbalance:.2f}"
            )
        balance_experts(network, s.balance_rate * scale)
        if (step + 1) % s.checkpoint_every == 0 or step + 1 == s.steps:
            _save(path, network, optimizer, step + 1)
        if (step + 1) % s.validate_every == 0 or step + 1 == s.steps:
            v = validate(network, tokenizer, s.validation_dialogues)
            log(
                f"base: step {step + 1} held-out loss {v.loss:.4f} tokens right {v.token_accuracy:.4f} "
                f"messages right {v.message_accuracy:.4f}"
            )


def _batches(tokenizer: Tokenizer, s: BaseSettings, seed: int) -> Iterator[tuple[int, TrainingBatch]]:
    """The batches of all steps: short dialogues, and long ones every `long_every` steps."""
    short = dialogue_batches(tokenizer, seed, step_tokens=s.step_tokens)
    for step in range(s.steps):
        if step % s.long_every == s.long_every - 1:
            yield step, long_batch(tokenizer, seed, step // s.long_every, max_tokens=s.long_max_tokens)
        else:
            yield step, next(short)


def _resume(path: Path, network: Network, optimizer: Optimizer) -> int:
    """Load the checkpoint at `path`, if it exists; returns the step to continue from."""
    if not path.exists():
        return 0
    saved = load_run(path)
    network.load_state_dict(without_prefix("network.", saved))
    optimizer.load_state(without_prefix("optimizer.", saved))
    return int(saved["step"].item())


def _save(path: Path, network: Network, optimizer: Optimizer, step: int) -> None:
    tensors = with_prefix("network.", network.state_dict())
    tensors |= with_prefix("optimizer.", optimizer.state())
    tensors["step"] = torch.tensor([step])
    save_run(path, tensors)
