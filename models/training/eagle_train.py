"""Trains the EAGLE-3 head against the exported model, with the multi-step unrolled loss.

The loss of a draft step is the cross entropy with the target's whole distribution at that position, weighted
by `step_decay ** step` (EAGLE-3, arXiv 2503.01840). Only rows with drafts inside an assistant span count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.text.tokenizer import Tokenizer
from models.acceptance import accepted_lengths
from models.networks.draft_circuit import write_draft_circuit
from models.networks.eagle_network import EagleShape, TrainableEagleHead
from models.networks.network import Network
from models.settings import HELD_OUT_SEED, EagleSettings, step_lr_scale
from models.training.batches import Example, encode_many
from models.training.optimizer import Optimizer
from models.training.parallel import accumulate_gradients, worker_pool
from models.training.run_state import load_run, save_run, with_prefix, without_prefix

Log = Callable[[str], None]
Part = tuple[Example, int]
"""A dialogue, and its first position in the drafter's window."""

_WORKERS = 2
_CHUNK = 64


def make_head(target: Network, s: EagleSettings, seed: int) -> TrainableEagleHead:
    """A new head for `target` with the initial weights of `models.networks.draft_circuit`."""
    torch.manual_seed(seed)
    a = target.a
    head = TrainableEagleHead(
        EagleShape(
            hidden_size=a.hidden_size,
            vocab_size=a.vocab_size,
            num_attention_heads=s.num_attention_heads,
            head_dim=s.head_dim,
            intermediate_size=s.intermediate_size,
            rope_theta=s.rope_theta,
            rms_norm_eps=a.rms_norm_eps,
            max_position_embeddings=a.max_position_embeddings,
            output_layer_ids=s.output_layer_ids,
        )
    )
    with torch.no_grad():
        head.norm.weight.copy_(target.norm.weight)
    write_draft_circuit(head, target)
    return head


@torch.no_grad()
def target_view(target: Network, ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(features [L, 3H], hidden states after the final norm [L, H]) of the target over one document."""
    out = target(ids.unsqueeze(0))
    return torch.cat([out.streams[i][0] for i in layer_ids], dim=-1), out.hidden[0]


def unrolled_loss(
    head: TrainableEagleHead, target: Network, part: Part, s: EagleSettings
) -> tuple[Tensor, Tensor]:
    """(sum over draft steps and rows of the decayed cross entropies, number of rows)."""
    example, start = part
    ids = torch.tensor(example.token_ids)
    features, hidden = target_view(target, ids, s.output_layer_ids)
    stop = min(start + s.window_tokens, len(ids))
    embedded = F.embedding(ids, target.embed_tokens.weight)[start:stop]
    rows, ends = drafting_rows(example, start, stop)
    # Row i predicts i + 2 + s at step s: rows near the end of their span draft fewer steps.
    padded = F.pad(embedded, (0, 0, 0, s.unroll_steps))
    drafted = head.unroll(features[start : stop - 1], padded, rows, s.unroll_steps)
    loss = torch.zeros(())
    for step, states in enumerate(drafted):
        kept = rows + 2 + step < ends
        with torch.no_grad():
            wanted = target.logits(hidden[start + rows[kept] + 1 + step]).softmax(-1)
        scores = head.logits(states[kept]).log_softmax(-1)
        loss = loss - s.step_decay**step * (wanted * scores).sum()
    return loss, torch.tensor(float(len(rows)))


def drafting_rows(example: Example, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The rows (relative to `start`) that draft in an assistant span in [start, stop), and the spans' ends.

    Row i has token i + 1 as input and drafts from i + 2 on.
    """
    rows, ends = [], []
    for first, last in example.spans:
        begin, end = max(first - 1, start), min(last, stop)
        rows.append(torch.arange(begin, max(end - 2, begin)) - start)
        ends.append(torch.full_like(rows[-1], end - start))
    return torch.cat(rows), torch.cat(ends)


def build_optimizer(head: TrainableEagleHead, s: EagleSettings) -> Optimizer:
    """Muon for the matrices, AdamW for the output head and the norms."""
    muon = {name for name, p in head.named_parameters() if p.ndim == 2 and not name.startswith("lm_head")}
    return Optimizer(
        head.named_parameters(),
        muon_names=frozenset(muon),
        muon_lr=s.muon_lr,
        muon_momentum=s.muon_momentum,
        adam_lr=s.adam_lr,
        adam_betas=s.adam_betas,
        weight_decay=s.weight_decay,
    )


@torch.no_grad()
def validate_head(
    head: TrainableEagleHead, target: Network, tokenizer: Tokenizer, s: EagleSettings, dialogues: int
) -> float:
    """Acceptance length (3 drafts, greedy, bonus counted) on held-out dialogues, teacher-forced."""
    steps, tokens = 0, 0
    for example in encode_many(tokenizer, HELD_OUT_SEED, dialogues):
        features, hidden = target_view(target, torch.tensor(example.token_ids), s.output_layer_ids)
        lengths = accepted_lengths(head, target, example, features, target.logits(hidden), drafts=3)
        steps += len(lengths)
        tokens += sum(lengths)
    return tokens / steps


def window_parts(tokenizer: Tokenizer, s: EagleSettings, seed: int) -> Iterator[Part]:
    """Endless dialogues with random windows, after those that the base run may have seen."""
    chunk = s.first_chunk
    while True:
        rng = Random(f"{seed}:{chunk}")
        for example in encode_many(tokenizer, seed, _CHUNK, start=chunk * _CHUNK):
            surplus = max(len(example.token_ids) - s.window_tokens, 0)
            yield example, rng.randint(0, surplus)
        chunk += 1


def train_eagle(
    target: Network, tokenizer: Tokenizer, s: EagleSettings, seed: int, path: Path, log: Log
) -> TrainableEagleHead:
    """Train to the end, from the checkpoint at `path` if there is one; `target` does not change."""
    head = make_head(target, s, seed)
    optimizer = build_optimizer(head, s)
    first = 0
    if path.exists():
        saved = load_run(path)
        head.load_state_dict(without_prefix("head.", saved))
        optimizer.load_state(without_prefix("optimizer.", saved))
        first = int(saved["step"].item())
        log(f"eagle: goes on from step {first}")
    target.eval().requires_grad_(False)
    stream = window_parts(tokenizer, s, seed)
    parameters = list(head.parameters())
    began = time.monotonic()
    with worker_pool(_WORKERS) as pool:
        for step in range(s.steps):
            parts = [next(stream) for _ in range(s.step_dialogues)]
            if step < first:
                continue
            loss = accumulate_gradients(
                pool, parameters, lambda part: unrolled_loss(head, target, part, s), parts
            )
            optimizer.step(
                step_lr_scale(step, steps=s.steps, warmup_steps=s.warmup_steps, decay_steps=s.decay_steps),
                pool,
            )
            if step % 10 == 0:
                pace = (time.monotonic() - began) / (step - first + 1)
                log(f"eagle: step {step}/{s.steps} loss {loss:.4f} s/step {pace:.2f}")
            if (step + 1) % s.checkpoint_every == 0 or step + 1 == s.steps:
                _save(path, head, optimizer, step + 1)
            if (step + 1) % s.validate_every == 0 or step + 1 == s.steps:
                length = validate_head(head, target, tokenizer, s, s.validation_dialogues)
                log(f"eagle: step {step + 1} held-out acceptance length {length:.3f}")
    return head


def _save(path: Path, head: TrainableEagleHead, optimizer: Optimizer, step: int) -> None:
    tensors = with_prefix("head.", head.state_dict()) | with_prefix("optimizer.", optimizer.state())
    save_run(path, tensors | {"step": torch.tensor([step])})
