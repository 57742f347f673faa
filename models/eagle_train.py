"""Training of the EAGLE-3 head against the exported model, with the multi-step unrolled loss.

Per draft step: cross entropy with the target's whole distribution at that position, weighted by
`step_decay ** step` (EAGLE-3, arXiv 2503.01840). Only rows count whose draft continues what the assistant writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.text.tokenizer import Tokenizer
from models.acceptance import accepted_lengths
from models.batches import Batch, collate, dialogue_batches, encode_many
from models.eagle_network import EagleHead, EagleShape
from models.network import Network
from models.optimizer import Optimizer
from models.run_state import load_run, save_run, with_prefix, without_prefix
from models.settings import HELD_OUT_SEED, EagleSettings, step_lr_scale

Log = Callable[[str], None]


def make_head(target: Network, s: EagleSettings, seed: int) -> EagleHead:
    """A fresh head for `target`; its scores start as the target's own."""
    torch.manual_seed(seed)
    a = target.a
    head = EagleHead(
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
    score = target.embed_tokens if target.lm_head is None else target.lm_head
    with torch.no_grad():
        head.lm_head.weight.copy_(score.weight)
        head.norm.weight.copy_(target.norm.weight)
    return head


def cut_window(batch: Batch, window_tokens: int, rng: Random) -> slice:
    """A random stretch of at most `window_tokens` positions that the drafter is to remember."""
    length = batch.token_ids.shape[1]
    if length <= window_tokens:
        return slice(0, length)
    start = rng.randint(0, length - window_tokens)
    return slice(start, start + window_tokens)


@torch.no_grad()
def target_view(target: Network, batch: Batch, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(features [B, L, 3H], logits [B, L, V]) of the target over whole dialogues."""
    out = target(batch.token_ids)
    features = torch.cat([out.streams[i] for i in layer_ids], dim=-1)
    return features, target.logits(out.hidden)


def unrolled_loss(
    head: EagleHead, target: Network, batch: Batch, s: EagleSettings, window: slice
) -> Tensor:
    """Sum over draft steps of the decayed mean cross entropy with the target's distribution."""
    features, logits = target_view(target, batch, s.output_layer_ids)
    features, logits = features[:, window], logits[:, window]
    ids, generated = batch.token_ids[:, window], batch.generated[:, window]
    n = ids.shape[1] - 1 - s.unroll_steps
    embedded = F.embedding(ids, target.embed_tokens.weight)
    hidden = head.unroll(features[:, :n], embedded, s.unroll_steps)
    loss = torch.zeros(())
    chain = generated[:, 1 : 1 + n]
    for step in range(s.unroll_steps):
        chain = chain & generated[:, 2 + step : 2 + step + n]
        wanted = logits[:, 1 + step : 1 + step + n][chain].softmax(-1)
        scores = head.logits(hidden[step][chain]).log_softmax(-1)
        cross = -(wanted * scores).sum() / chain.sum().clamp(min=1)
        loss = loss + s.step_decay**step * cross
    return loss


def build_optimizer(head: EagleHead, s: EagleSettings) -> Optimizer:
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
    head: EagleHead, target: Network, tokenizer: Tokenizer, s: EagleSettings, dialogues: int
) -> float:
    """Acceptance length (3 drafts, greedy, bonus counted) on held-out dialogues, teacher-forced."""
    steps, tokens = 0, 0
    for example in encode_many(tokenizer, HELD_OUT_SEED, dialogues):
        batch = collate([example], pad_id=0, max_tokens=1 << 20)
        features, logits = target_view(target, batch, s.output_layer_ids)
        lengths = accepted_lengths(head, target, example, features[0], logits[0], drafts=3)
        steps += len(lengths)
        tokens += sum(lengths)
    return tokens / steps


def train_eagle(
    target: Network, tokenizer: Tokenizer, s: EagleSettings, seed: int, path: Path, log: Log
) -> EagleHead:
    """Trains to the end, from the checkpoint at `path` if there is one; `target` stays as it is."""
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
    # Other dialogues than the first ones of the base run: its features are of unseen text, as in service.
    batches = dialogue_batches(tokenizer, seed, step_tokens=s.step_tokens, start_chunk=s.first_chunk)
    began = time.monotonic()
    for step in range(s.steps):
        batch = next(batches)
        if step < first:
            continue
        window = cut_window(batch, s.window_tokens, Random(f"{seed}:{step}"))
        loss = unrolled_loss(head, target, batch, s, window)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(
            step_lr_scale(step, steps=s.steps, warmup_steps=s.warmup_steps, decay_steps=s.decay_steps)
        )
        if step % 10 == 0:
            pace = (time.monotonic() - began) / (step - first + 1)
            log(f"eagle: step {step}/{s.steps} loss {loss.item():.4f} s/step {pace:.2f}")
        if (step + 1) % s.checkpoint_every == 0 or step + 1 == s.steps:
            tensors = with_prefix("head.", head.state_dict()) | with_prefix("optimizer.", optimizer.state())
            save_run(path, tensors | {"step": torch.tensor([step + 1])})
        if (step + 1) % s.validate_every == 0 or step + 1 == s.steps:
            length = validate_head(head, target, tokenizer, s, s.validation_dialogues)
            log(f"eagle: step {step + 1} held-out acceptance length {length:.3f}")
    return head
